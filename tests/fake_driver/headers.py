"""Finds the vendors' headers that the fake drivers are compiled against, or fetches them.

    python -m tests.fake_driver.headers      fetch what is missing into .venv/vendor-headers

They come from packages named below: NVIDIA's own, and for AMD a package that ships ROCm's headers
(PyPI's `triton` has the same ones and is used where torch has brought it along; Debian's
`libamdhip64-dev` is too old where this was written: ROCm 5 had another hipMemAllocationProp).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from broker.devices.libraries import Vendor

FOLDER = Path(__file__).parents[2] / ".venv" / "vendor-headers"


class Source(NamedTuple):
    """One vendor's header: the file whose folder is meant, and how its version is read."""

    header: str
    version_file: str
    version: str
    oldest: int
    requirement: tuple[str, ...]
    prefix: str
    """Folder of the headers in the package, as a regular expression."""


SOURCES: dict[Vendor, Source] = {
    "nvidia": Source(
        "cuda.h",
        "cuda.h",
        r"#define CUDA_VERSION (\d+)",
        11040,
        ("nvidia-cuda-runtime>=13,<14",),
        r"nvidia/\w+/include/(?=cuda\.h$)",
    ),
    "amd": Source(
        "hip/hip_runtime_api.h",
        "hip/hip_version.h",
        r"#define HIP_VERSION_MAJOR (\d+)",
        6,
        # The same headers as in `triton`, at a fifth of its size; nothing of it is ever run.
        ("triton-windows==3.8.0.post29", "--platform", "win_amd64", "--python-version", "3.12"),
        r"triton/backends/amd/include/(?=hip/)",
    ),
}


def find(vendor: Vendor) -> Path | None:
    """A folder to include from with new enough headers of the vendor, or `None`."""
    source = SOURCES[vendor]
    for folder in _folders(vendor):
        version_file = folder / source.version_file
        if not (folder / source.header).is_file() or not version_file.is_file():
            continue
        found = re.search(source.version, version_file.read_text("utf-8", "replace"))
        if found and int(found[1]) >= source.oldest:
            return folder
    return None


def _folders(vendor: Vendor) -> Iterator[Path]:
    yield FOLDER / vendor
    for place in map(Path, sys.path):
        yield place / "triton" / "backends" / vendor / "include"
        if vendor == "nvidia":
            yield from sorted(place.glob("nvidia/*/include"))
    if vendor == "nvidia":
        yield from sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    else:
        yield Path("/opt/rocm/include")
    yield Path("/usr/include")


def fetch(vendor: Vendor) -> None:
    """Download the package by name with pip and unpack nothing but its headers."""
    source = SOURCES[vendor]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, *source.requirement]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            for name in package.namelist():
                prefix = re.match(source.prefix, name)
                if prefix and not name.endswith("/"):
                    target = FOLDER / vendor / name[prefix.end() :]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(package.read(name))


def main() -> int:
    """Fetch each vendor's headers unless they are here; 1 if some cannot be had."""
    missing = 0
    for vendor in SOURCES:
        if find(vendor) is None:
            try:
                fetch(vendor)
            except (subprocess.CalledProcessError, OSError, ValueError) as error:
                sys.stderr.write(f"no {vendor} headers, their tests will be skipped: {error}\n")
                missing = 1
    return missing


if __name__ == "__main__":
    sys.exit(main())
