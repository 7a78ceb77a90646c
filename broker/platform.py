"""May this machine and this process share device memory? Checked before anything is opened.

Only CUDA and ROCm devices can be shared between processes. Everything else is refused in one
sentence that says what was found, why it cannot serve and what to do instead; there is no fallback.
The simulated device is for trials and has to be asked for by name.

The steps, in `broker.platform_checks` and `broker.platform_sharing`, are plain functions of what a
`Probe` sees, so every platform is tested on any machine. Imports neither torch nor zmq, and neither
does what it calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from broker.device_names import AUTO
from broker.errors import UnsupportedPlatformForIPCError
from broker.platform_checks import ALL_HIDING, Check
from broker.platform_probe import Probe
from broker.platform_sharing import Step, Where

if TYPE_CHECKING:
    from broker.devices.base import Canary

__all__ = ["PlatformReport", "Step", "Where", "check_ipc_platform_support", "platform_steps"]


@dataclass(frozen=True)
class PlatformReport:
    """A platform that may share.

    Attributes:
        platform: "cuda", "rocm" or "simulated".
        canaries: on a broker's GPUs the slab that the round trip left, by UUID. Borrowed: they stay
            open as long as the process lives.
    """

    where: Where
    platform: str
    steps: tuple[Step, ...]
    canaries: Mapping[str, Canary] = field(default_factory=dict)


_cache: dict[tuple[Any, ...], Check] = {}


def check_ipc_platform_support(
    *, where: Where, device: str = AUTO, probe: Probe | None = None
) -> PlatformReport:
    """Make sure that device memory can be shared between processes here.

    Opens no socket, creates no file, imports no torch and initialises no driver in this process
    (child processes do, each with a deadline of a minute; a broker's check needs seconds on a
    GPU). The result is kept for the life of the process, for each `device` and state of the
    variables that hide GPUs; a given `probe` is always asked anew.

    Args:
        where: which side asks; it starts every sentence.
        device: "auto", a GPU ("cuda", "cuda:1", a UUID) or several separated by commas, or
            "simulated" for the simulated device, which is never chosen otherwise and needs Linux
            only.
        probe: what to look with; for tests. Canaries are then the caller's to close.

    Raises:
        UnsupportedPlatformForIPCError: it cannot; with `where`, `platform` and `reason`.
    """
    check = _cached(where, device) if probe is None else _checked(where, device, probe)
    last = check.steps[-1]
    if not last.ok:
        raise UnsupportedPlatformForIPCError(
            last.sentence, where=where, platform=last.platform, reason=last.reason
        )
    return PlatformReport(where, last.platform, tuple(check.steps), check.canaries)


def platform_steps(where: Where, device: str = AUTO, probe: Probe | None = None) -> list[Step]:
    """The same check step by step, for a person to read: the last step may have failed.

    Raises nothing for an unsupported platform, and never answers from memory.
    """
    check = _checked(where, device, probe or Probe())
    check.close_canaries()
    return check.steps


def _cached(where: Where, device: str) -> Check:
    probe = Probe()
    environ = probe.environ()
    key = (where, device, *(environ.get(name) for name in ALL_HIDING))
    if key not in _cache:
        _cache[key] = _checked(where, device, probe)
    return _cache[key]


def _checked(where: Where, device: str, probe: Probe) -> Check:
    check = Check(where, probe)
    check.run(device)
    return check
