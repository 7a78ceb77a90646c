"""The server that `serve` forks before anything else: it serves as any other, or is gone."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaign import kernel
from tests.campaign.asking import ask_status
from tests.support.clock import SCALE, eventually
from tests.support.processes import (
    ROOT,
    RunningBroker,
    descriptors,
    is_alive,
    processes_of,
    wait_until_gone,
)

FORK = """
import os, signal, sys
from broker.first_server import discard_server, fork_server, take_server
code = fork_server([])
if code is not None:
    sys.exit(code)
server, link = take_server()
"""
"""The beginning of a script that has a server which waits."""


def run(script: str) -> str:
    """What a script that begins with a fork prints."""
    command = [sys.executable, "-c", FORK + script]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=20 * SCALE, check=False
    )
    assert done.stderr == ""
    return done.stdout


def test_first_server_is_a_fork_and_the_next_is_not(broker: RunningBroker) -> None:
    """What `ps` shows of the first is `serve`; its successor is a server by its own command."""
    first = broker.server_pid()
    assert kernel.command_line(first) == kernel.command_line(broker.pid)
    os.kill(first, signal.SIGKILL)
    wait_until_gone(first)
    second = ask_status(broker.directory)["broker"]["pid"]
    assert "broker.server_process" in kernel.command_line(second)


def test_first_server_has_a_session_of_its_own_and_no_input(broker: RunningBroker) -> None:
    """A Ctrl-C in the terminal is the keeper's to handle, and nobody's input is read."""
    server = broker.server_pid()
    assert os.getsid(server) == server
    assert str(Path(f"/proc/{server}/fd/0").readlink()) == os.devnull


def test_first_server_may_open_as_much_as_its_successors(
    start_broker: Callable[..., RunningBroker],
) -> None:
    """It is there before the keeper takes all descriptors that are allowed, and takes its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        broker = start_broker()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for pid in (broker.pid, broker.server_pid()):
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_first_server_inherits_no_files(broker_dir: Path) -> None:
    """What the shell had open stays with the keeper: the other end sees its end in time."""
    reader, writer = os.pipe()
    keeper = subprocess.Popen(
        [sys.executable, "-m", "broker", "serve", "--device", "simulated", "--dir", broker_dir],
        cwd=ROOT,
        pass_fds=[writer],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert keeper.stdout is not None
    with keeper.stdout:
        server = int(keeper.stdout.readline().partition("server_pid=")[2])
        pipe = str(Path(f"/proc/self/fd/{writer}").readlink())
        assert pipe in descriptors(keeper.pid)
        assert pipe not in descriptors(server)
        keeper.terminate()
        assert keeper.wait(10 * SCALE) == 0
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str, broker_dir: Path) -> None:
    """What a shell has closed is as if it were /dev/null: no socket gets its number."""
    serve = f"exec {sys.executable} -m broker serve --device simulated --dir {broker_dir} {closed}"
    keeper = subprocess.Popen(
        ["sh", "-c", serve], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    server = int(ask_status(broker_dir)["broker"]["pid"])
    for pid in (keeper.pid, server):
        streams = [str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in range(3)]
        assert not [stream for stream in streams if "socket" in stream]
    keeper.terminate()
    _out, said = keeper.communicate(timeout=10 * SCALE)
    assert (keeper.returncode, "Traceback" in said) == (0, False)


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--no-such-option"], ["--device", "nonsense"], ["--print-config"]],
    ids=["help", "misspelt", "refused", "only printed"],
)
def test_nothing_to_serve(words: list[str], broker_dir: Path) -> None:
    """A `serve` that does not serve leaves no process behind: its output ends with it."""
    environment = {**os.environ, "WEIGHT_BROKER_TEST_LOADER": f"{broker_dir}/no-order"}
    command = [sys.executable, "-m", "broker", "serve", *words]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20 * SCALE,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert processes_of(broker_dir) == []


def started(broker_dir: Path, before: str) -> subprocess.Popen[str]:
    """`serve` after some lines of Python."""
    script = f"""
import os, signal, sys
sys.argv = ["weight-broker", "serve", "--device", "simulated", "--dir", {str(broker_dir)!r}]
from broker.__main__ import run
{before}
sys.exit(run())
"""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "WEIGHT_BROKER_TEST_LOADER": f"{broker_dir}/no-order"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_interrupt_while_it_forks(moment: str, broker_dir: Path) -> None:
    """Python drops an interrupt that comes in the middle of a fork: it comes after it."""
    interrupt = "lambda: os.kill(os.getpid(), signal.SIGINT)"
    keeper = started(broker_dir, f"os.register_at_fork({moment}={interrupt})")
    _out, said = keeper.communicate(timeout=20 * SCALE)
    assert (keeper.returncode, "Traceback" in said) == (130, False), said
    eventually(lambda: processes_of(broker_dir) == [], 5, "the end of the forked server")
    assert list(broker_dir.iterdir()) == []


def test_system_that_refuses_a_fork(broker_dir: Path) -> None:
    """Then the first server is started as later ones are."""
    keeper = started(broker_dir, "def fork(): raise BlockingIOError\nos.fork = fork")
    server = ask_status(broker_dir)["broker"]["pid"]
    assert "broker.server_process" in kernel.command_line(server)
    keeper.terminate()
    keeper.communicate(timeout=10 * SCALE)
    assert keeper.returncode == 0


def test_ended_children_that_are_ignored(broker_dir: Path) -> None:
    """Whoever starts a broker may ignore SIGCHLD: it still learns how its servers end."""
    keeper = started(broker_dir, "signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    first = ask_status(broker_dir)["broker"]["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until_gone(first)
    assert ask_status(broker_dir)["broker"]["restarts"] == 1
    keeper.terminate()
    _out, said = keeper.communicate(timeout=10 * SCALE)
    assert (keeper.returncode, "Traceback" in said) == (0, False)
    assert "server-died exit=-9" in said


def test_ready_line_that_cannot_be_written(broker_dir: Path) -> None:
    """The server has ended, in order, when `serve` says why it does not go on."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "broker", "serve", "--device", "simulated", "--dir", broker_dir],
            cwd=ROOT,
            env={**os.environ, "WEIGHT_BROKER_TEST_LOADER": f"{broker_dir}/no-order"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=20 * SCALE,
            check=False,
        )
    assert done.returncode == 2
    assert processes_of(broker_dir) == []
    assert "keeper-" not in done.stderr
    assert done.stderr.endswith("standard output cannot be written (No space left on device)\n")


def test_keeper_dies_before_it_needs_the_server() -> None:
    """The end of the link ends a server that waits."""
    said = run("print(server.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)")
    waiting = int(said)
    eventually(lambda: not is_alive(waiting), 5, "the server's end")


def test_waiting_for_its_end() -> None:
    """`wait` has a deadline, tells by which signal it ended, and signals to the dead do nothing."""
    said = run(
        """
import subprocess
try:
    server.wait(0.0)
except subprocess.TimeoutExpired:
    print("lives")
server.kill()
print(server.wait(), server.wait(1.0))
server.send_signal(signal.SIGTERM)
print(take_server())
discard_server()
"""
    )
    assert said == "lives\n-9 -9\nNone\n"
