"""Namespaces as a container has them, by unshare(1): what a test starts `within` one."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

OTHERS = ("--pid", "--fork", "--mount", "--mount-proc", "--ipc", "--kill-child")
SHM_BYTES = 65_536


@functools.cache
def why_not() -> str:
    """Why this machine cannot make them; "" if it can."""
    try:
        done = subprocess.run(
            ["unshare", *OTHERS, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unshare cannot be run: {error}"
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


def container(*mounts: tuple[Path, Path]) -> list[str]:
    """The beginning of a command that runs in namespaces of its own.

    Args:
        mounts: (from outside, to where inside) of what is shared; the places must exist.

    Other processes are not seen there, /dev/shm is another and holds 64 KiB.
    """
    script = [f"mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm"]
    script += [f"mount --bind {outside} {inside}" for outside, inside in mounts]
    return ["unshare", *OTHERS, "sh", "-ec", "; ".join([*script, 'exec "$@"']), "container"]
