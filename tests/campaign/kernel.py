"""What the kernel says of processes: the truth that a broker's books are compared with."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

SLAB = "weight-broker-slab"


def slabs(pid: int) -> dict[int, int]:
    """Slabs a process has descriptors of: bytes by inode. Empty if the process is gone."""
    found: dict[int, int] = {}
    for link in _descriptors(pid):
        try:
            if SLAB in str(link.readlink()):
                status = link.stat()
                found[status.st_ino] = status.st_size
        except OSError:  # closed meanwhile
            continue
    return found


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(_descriptors(pid))


def kinds_of_descriptors(pid: int) -> Counter[str]:
    """What they are, for a message: socket, pidfd, memfd names …"""
    kinds: Counter[str] = Counter()
    for link in _descriptors(pid):
        try:
            kinds[str(link.readlink()).split(":[")[0].split(" ")[0]] += 1
        except OSError:
            continue
    return kinds


def _descriptors(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def mapped(pid: int) -> Counter[int]:
    """Bytes of slabs that a process has mapped, by inode."""
    found: Counter[int] = Counter()
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        if SLAB in line:
            span, _rights, _offset, _device, inode, *_ = line.split()
            begin, _, end = span.partition("-")
            found[int(inode)] += int(end, 16) - int(begin, 16)
    return found


def state(pid: int) -> str:
    """The kernel's letter for what a process does; "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def children(pid: int) -> list[int]:
    """Processes this one has started, zombies too."""
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return found
    for task in tasks:
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def threads(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return 0


def resident_bytes(pid: int) -> int:
    """Resident memory (proc(5), statm); 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
