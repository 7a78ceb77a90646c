"""The systemd unit: systemd takes it, and its times and exit codes are the broker's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from broker.errors import BadRequest, Busy, UnsupportedPlatformForIPCError
from broker.keeper import STOP_SECONDS
from broker.limits import DEFAULTS
from tests.deploy.files import UNIT, check_command, unit_seconds, unit_values
from tests.support.clock import SCALE

SYSTEMD_ANALYZE = shutil.which("systemd-analyze")
INSTALLED = "/opt/weight-broker/bin/weight-broker"
START_SECONDS = 20.0
"""Ample for a server that takes over; it says that its loop turns as soon as it does."""


def verified(unit: str, folder: Path) -> tuple[int, str]:
    """What `systemd-analyze verify` says of a unit whose program is there."""
    path = folder / "weight-broker.service"
    path.write_text(unit.replace(INSTALLED, sys.executable))
    done = subprocess.run(
        [str(SYSTEMD_ANALYZE), "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=20 * SCALE,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="there is no systemd-analyze here")
def test_systemd_takes_it(tmp_path: Path) -> None:
    """No word of complaint; of a setting that does not exist there is one."""
    assert verified(UNIT, tmp_path) == (0, "")
    _code, complaint = verified(UNIT.replace("WatchdogSec=", "WatchDogSeconds="), tmp_path)
    assert "WatchDogSeconds" in complaint


def test_what_it_runs() -> None:
    """The commands are ours; the directory of the sockets is the runtime directory."""
    for key, words in (("ExecStart", ["serve"]), ("ExecReload", ["upgrade"])):
        assert unit_values(key) == [" ".join([INSTALLED, *words])]
        check_command(words)
    assert unit_values("Environment") == [
        f"WEIGHT_BROKER_DIR=/run/{unit_values('RuntimeDirectory')[0]}"
    ]
    assert unit_values("RuntimeDirectoryMode") == ["0700"]
    assert unit_values("Type") == ["notify"]


def test_times() -> None:
    """The keeper gets its turn before systemd: it kills a server that hangs after half the time of
    the watchdog, starts the next one after the longest pause, and has it heard in time. An orderly
    stop has the time that the keeper gives it."""
    watchdog = unit_seconds("WatchdogSec")
    assert watchdog / 2 + DEFAULTS.restart_seconds + START_SECONDS < watchdog
    assert unit_seconds("TimeoutStopSec") > STOP_SECONDS


def test_what_is_not_tried_again() -> None:
    """Exit codes that another start cannot mend are those of the errors that it says."""
    (codes,) = unit_values("RestartPreventExitStatus")
    hopeless = (BadRequest, UnsupportedPlatformForIPCError, Busy)
    assert [int(code) for code in codes.split()] == [error.exit_code for error in hopeless]
