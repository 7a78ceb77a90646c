"""Small blobs that travel by descriptor and that nobody can change any more."""

from __future__ import annotations

import fcntl
import os


def sealed_memfd(name: str, data: bytes) -> int:
    """A memfd holding `data`, sealed against every change; the caller owns it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
