"""An engine on a GPU that takes commands, as engine.py; it connects when it is told to.

`python -m tests.support.gpu_engine DIRECTORY`, in the environment of a `FakeNode`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from broker.checkpoints.identity import slab_identity
from broker.devices.libraries import OVERRIDES
from engine_client import mapping
from tests.support.engine import ToldEngine, obey


class GpuEngine(ToldEngine):
    """Looks at device memory through the device, as there is no torch for a fake GPU."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = [os.environ.get(name, "") for name in OVERRIDES.values()]
        self.driver = ctypes.CDLL(next(filter(None, paths)))

    def connect(self, device: str | None = None) -> dict[str, Any]:
        """A new client, in the place of the one there was."""
        self.close()
        super().__init__(self.directory, device)
        ours = self.client._device
        return {"uuid": ours.properties.uuid, "ordinal": ours.ordinal}

    def close(self) -> None:
        if "client" in vars(self):
            self.client.close()

    def identity(self, keep: str = "w") -> str:
        weights = self.weights[keep]
        return slab_identity(weights.manifest, weights.read)

    def address(self, keep: str = "w") -> int:
        return self.weights[keep]._lease.mapping.address

    def sleep(self, keep: str = "w") -> None:
        self.weights[keep].sleep()

    def wake(self, keep: str = "w") -> None:
        self.weights[keep].wake()

    def free_bytes(self) -> int:
        """Free memory of the client's device, by the driver's word."""
        return self.client._device.free_bytes()

    def resident_bytes(self) -> int:
        return self.client.resident_bytes()

    def live(self, kind: str) -> int:
        """Driver objects of a kind in this process."""
        return int(self.driver.fake_live(kind.encode()))

    def trust_nobody(self) -> None:
        """Compare the canary again before the next map, as a process does at its first."""
        mapping._compared.clear()

    def script(self, faults: str) -> None:
        """What the driver does wrong from now on, in this process."""
        self.driver.fake_script(faults.encode())


if __name__ == "__main__":
    obey(GpuEngine(Path(sys.argv[1])))
