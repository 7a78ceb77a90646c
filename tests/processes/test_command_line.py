"""The commands, against a real broker; and what `serve` refuses, with nothing left behind."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.__main__ import EXIT_INTERRUPTED
from broker.cli import main
from broker.errors import BadRequest, BrokerError, BrokerNotFound, Busy, LoadFailed, NotFound
from broker.platform import platform_steps
from engine_client import Checkpoint
from tests.support.clock import SCALE, eventually
from tests.support.processes import ROOT, Engine, LoaderFault, RunningBroker, wait_until_gone
from tests.support.status_schema import check_status
from tests.support.stored import small_checkpoint
from tests.support.terminal import Terminal

Capture = pytest.CaptureFixture[str]
DEVICE = "SIM-0"
NOBODY = 65534
NO_PLATFORM_EXIT = 3


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "checkpoint")


def run(capture: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    capture.readouterr()
    code = main(list(arguments))
    said = capture.readouterr()
    return code, said.out, said.err


def check_refused(result: tuple[int, str, str], code: int, *words: str) -> None:
    """A documented exit code and one sentence that has these words."""
    assert (result[0], result[1]) == (code, "")
    sentence = result[2]
    assert sentence.startswith(("weight-broker: ", "[weight-broker:broker] "))
    assert sentence.count("\n") == 1
    for word in words:
        assert word in sentence


# --- asking a broker ----------------------------------------------------------------------------


def test_status(
    shared_broker: RunningBroker,
    checkpoint: Path,
    start_engine: Callable[..., Engine],
    capsys: Capture,
) -> None:
    """Device, set and engine, both processes of the broker, and that the device is simulated."""
    engine = start_engine(shared_broker)
    engine.ask("acquire", path=str(checkpoint), name="assistant")
    code, out, err = run(capsys, "status", "--dir", str(shared_broker.directory))
    assert (code, err) == (0, "")
    for word in (
        "SIMULATED DEVICE",
        f"keeper pid {shared_broker.pid}, server pid {shared_broker.server_pid()}",
        f"device {DEVICE} simulated device",
        "  leased 256.0 KiB",
        "assistant#1",
        f"told engine (pid {engine.pid})",
        str(checkpoint),
        "told engine",
        str(engine.pid),
        "loads_started",
    ):
        assert word in out, out


def test_status_as_json(shared_broker: RunningBroker, checkpoint: Path, capsys: Capture) -> None:
    """`--json` is one object, as documented, with everything; bytes add up to the limit."""
    with (
        shared_broker.client(label="me") as client,
        client.acquire(Checkpoint(checkpoint)) as weights,
    ):
        code, out, _err = run(capsys, "status", "--json", "--dir", str(shared_broker.directory))
        report = json.loads(out)
    assert code == 0
    check_status(report)
    (entry,) = (entry for entry in report["sets"] if entry["id"] == weights.set_id)
    assert (entry["state"], entry["nbytes"], entry["tensors"]) == ("sealed", weights.nbytes, 4)
    assert entry["key"]["checkpoint"] == weights.key.checkpoint
    (me,) = (session for session in report["sessions"] if session["label"] == "me")
    assert (me["pid"], me["uid"], me["leases"]) == (os.getpid(), os.getuid(), 1)
    use = report["devices"][DEVICE]
    assert use["limit"] == use["leased"] + use["idle"] + use["reserved"] + use["free"]


def test_status_again_and_again(shared_broker: RunningBroker) -> None:
    """`--watch` on a terminal refreshes in place until Ctrl-C, which is no failure."""
    directory = str(shared_broker.directory)
    with Terminal("status", "--watch", "0.1", "--dir", directory, width=80) as terminal:
        for _ in range(3):
            terminal.read_until("counters of the last")
            terminal.read_until("\x1b[H")  # back to the upper left corner
        assert terminal.interrupt() == 0
    assert "Traceback" not in terminal.text


def test_status_again_and_again_for_a_program(shared_broker: RunningBroker) -> None:
    """`--watch --json` is one object a line."""
    command = ("status", "--watch", "0.1", "--json", "--dir", str(shared_broker.directory))
    with Terminal(*command, width=80) as terminal:
        for _ in range(2):
            check_status(json.loads(terminal.read_until("\n")))
        assert terminal.interrupt() == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_watch_refuses(seconds: str, capsys: Capture) -> None:
    """Only times that pass can be waited for."""
    with pytest.raises(SystemExit) as caught:
        main(["status", f"--watch={seconds}"])
    assert caught.value.code == BadRequest.exit_code
    assert "argument --watch: give 0.1 seconds or more" in capsys.readouterr().err


def test_status_of_an_engine_with_a_wicked_label(
    shared_broker: RunningBroker, capsys: Capture
) -> None:
    """What an engine calls itself cannot move the cursor of whoever looks at it."""
    with shared_broker.client(label="\x1b[2J\nall is well"):
        _code, out, _err = run(capsys, "status", "--dir", str(shared_broker.directory))
    assert "\x1b" not in out
    assert r"\x1b[2J\nall is well" in out


def test_status_for_a_reader_that_went_away(shared_broker: RunningBroker) -> None:
    """Output into a closed pipe is no error and prints none."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "broker", "status", "--dir", str(shared_broker.directory)],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=30 * SCALE,
        cwd=ROOT,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("command", ["status", "evict x", "verify", "shutdown"])
def test_no_broker(command: str, broker_dir: Path, capsys: Capture) -> None:
    """Without a broker each command says where it looked."""
    result = run(capsys, *command.split(), "--dir", str(broker_dir))
    check_refused(result, BrokerNotFound.exit_code, str(broker_dir), "weight-broker serve")


@pytest.mark.parametrize("command", ["status", "ping", "report x.html"])
def test_no_directory(command: str, broker_dir: Path, capsys: Capture) -> None:
    """A file where `--dir` is to be a directory is told with the option that can name another."""
    (broker_dir / "file").touch(0o600)
    result = run(capsys, *command.split(), "--dir", str(broker_dir / "file"))
    words = (f"{broker_dir / 'file'} is not a directory", "name another one with --dir or ")
    check_refused(result, BadRequest.exit_code, *words)


def test_evict(shared_broker: RunningBroker, checkpoint: Path, capsys: Capture) -> None:
    """By id, name or identity; a leased set goes with its last lease; an unknown one is told."""
    directory = str(shared_broker.directory)
    with shared_broker.client() as client:
        weights = client.acquire(Checkpoint(checkpoint, "to go"))
        number = weights.set_id
        code, out, _err = run(capsys, "evict", "--dir", directory, "to go")
        said = "evicted when their last lease ends, unless an engine asks for them before"
        assert (code, out) == (0, f"{said}: set {number}\n")
        _code, out, _err = run(capsys, "list", "--dir", directory)
        (line,) = [line for line in out.splitlines() if line.startswith("to go")]
        assert "draining" in line
        weights.release()
        eventually(lambda: number not in set_ids(shared_broker), 1, "the end of the set")
        result = run(capsys, "evict", "--dir", directory, "to go")
        check_refused(result, NotFound.exit_code, "'to go'")
        with client.acquire(Checkpoint(checkpoint)) as weights:
            identity, number = weights.key.checkpoint, weights.set_id
        eventually(lambda: not shared_broker.leases(), 5, "the end of the lease")
        code, out, _err = run(capsys, "evict", "--dir", directory, identity)
        assert (code, out) == (0, f"evicted: set {number}\n")
    assert number not in set_ids(shared_broker)


def test_pin_saves_what_was_to_go(
    shared_broker: RunningBroker, checkpoint: Path, capsys: Capture
) -> None:
    """A set that is evicted while it is leased stays if it is pinned then, and that is told."""
    directory = str(shared_broker.directory)
    with shared_broker.client() as client, client.acquire(Checkpoint(checkpoint, "kept")) as kept:
        run(capsys, "evict", "--dir", directory, "kept")
        code, out, _err = run(capsys, "pin", "--dir", directory, "kept")
        assert (code, out.splitlines()) == (
            0,
            [
                f"pinned: set {kept.set_id}",
                f"no longer to go with the last lease: set {kept.set_id}",
            ],
        )
        number = kept.set_id
    assert number in set_ids(shared_broker)
    code, out, _err = run(capsys, "pin", "--dir", directory, "kept")
    assert out == f"pinned: set {number}\n"
    run(capsys, "unpin", "--dir", directory, "kept")
    run(capsys, "evict", "--dir", directory, "kept")


def test_publish_interrupted(shared_broker: RunningBroker, checkpoint: Path) -> None:
    """Ctrl-C says what becomes of the load, and that is what becomes of it."""
    directory = str(shared_broker.directory)
    shared_broker.order_loaders(LoaderFault.STOPS_AT_START)
    command = ("publish", str(checkpoint), "--name", "given up", "--dir", directory)
    with Terminal(*command, width=80) as terminal:
        shared_broker.stopped_loader()
        assert terminal.interrupt() == EXIT_INTERRUPTED
        said = terminal.read_until("no new generation")
    assert "weight-broker: interrupted: gave up waiting for" in said
    shared_broker.let_loader_go()
    loaded = eventually(lambda: from_path(shared_broker, checkpoint, "sealed"), 20, "the load")
    assert [entry["names"] for entry in loaded] == [{}]
    shared_broker.evict_all()


def from_path(broker: RunningBroker, path: Path, state: str) -> list[dict[str, Any]]:
    sets = broker.status()["sets"]
    return [entry for entry in sets if (entry["path"], entry["state"]) == (str(path), state)]


def set_ids(broker: RunningBroker) -> list[int]:
    return [entry["id"] for entry in broker.status()["sets"]]


def test_publish_keeps_no_lease(
    shared_broker: RunningBroker, checkpoint: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published stays without one; where it came from is a whole path, also if it was given
    from here."""
    directory = str(shared_broker.directory)
    step = shared_broker.counts()
    monkeypatch.chdir(checkpoint.parent)
    code, out, _err = run(
        capsys, "publish", checkpoint.name, "--name", "team/made", "--dir", directory
    )
    assert (code, out.split(",")[0]) == (0, "team/made: generation 1")
    (entry,) = [each for each in shared_broker.status()["sets"] if "team/made" in each["names"]]
    assert (entry["path"], entry["leases"]) == (str(checkpoint), [])
    assert step.added("leases_reclaimed") == 0


@pytest.mark.parametrize("name", ["", os.fsdecode(b"a\xff")])
def test_publish_without_a_name(
    checkpoint: Path, broker_dir: Path, capsys: Capture, name: str
) -> None:
    """A name that is none is told by its option, before a broker is asked."""
    result = run(capsys, "publish", str(checkpoint), "--name", name, "--dir", str(broker_dir))
    check_refused(result, BadRequest.exit_code, f"--name {name!r}")


def test_list_of_no_names(broker: RunningBroker, capsys: Capture) -> None:
    """A person is told that there are none; a program gets nothing."""
    code, out, err = run(capsys, "list", "--dir", str(broker.directory))
    assert (code, out) == (0, "")
    assert err == "no weights have a name here; `status` shows those without\n"


def test_verify(shared_broker: RunningBroker, checkpoint: Path, capsys: Capture) -> None:
    """Resident weights are as they were loaded, and no lease is left; an unknown name is told."""
    directory = str(shared_broker.directory)
    with shared_broker.client() as client:
        with client.acquire(Checkpoint(checkpoint, "sound")) as weights:
            identity, number = weights.key.checkpoint, weights.set_id
        for which in ("sound", str(number), identity):
            code, out, err = run(capsys, "verify", "--dir", directory, which)
            assert (code, err) == (0, "")
            assert out == f"set {number}: {weights.nbytes} bytes, {identity}: as loaded\n"
        code, out, _err = run(capsys, "verify", "--dir", directory)
        assert (code, identity in out) == (0, True)
        check_refused(
            run(capsys, "verify", "--dir", directory, "nobody"), NotFound.exit_code, "'nobody'"
        )
    eventually(
        lambda: not any(entry["leases"] for entry in shared_broker.status()["sets"]),
        5,
        "the end of every lease",
    )


def test_verify_finds_damage(
    shared_broker: RunningBroker, checkpoint: Path, capsys: Capture
) -> None:
    """A set whose bytes are not those of its checkpoint is told, with both identities."""
    shared_broker.evict_all()
    shared_broker.order_loaders(LoaderFault.WRITES_ZEROS)
    with shared_broker.client() as client, client.acquire(Checkpoint(checkpoint, "bad")) as weights:
        identity = weights.key.checkpoint
    shared_broker.order_loaders(None)
    result = run(capsys, "verify", "--dir", str(shared_broker.directory), "bad")
    check_refused(result, LoadFailed.exit_code, "damaged", identity)
    shared_broker.evict_all()


def test_shutdown(broker: RunningBroker, checkpoint: Path, capsys: Capture) -> None:
    """Refused while leased, naming the holder; in order when free or forced."""
    directory = str(broker.directory)
    with broker.client() as client:
        weights = client.acquire(Checkpoint(checkpoint))
        result = run(capsys, "shutdown", "--dir", directory)
        holder = f"1 lease is held by process {os.getpid()}; "
        check_refused(result, Busy.exit_code, holder, "use shutdown --force")
        assert client.ping().pid == broker.server_pid()
        assert run(capsys, "shutdown", "--dir", directory, "--force") == (0, "stopped\n", "")
        assert len(bytes(weights.slab_memory())) == weights.nbytes
    assert broker.process.wait(5 * SCALE) == 0


def test_shutdown_of_an_idle_broker(broker: RunningBroker, capsys: Capture) -> None:
    """An idle broker has ended when the command has."""
    assert run(capsys, "shutdown", "--dir", str(broker.directory)) == (0, "stopped\n", "")
    wait_until_gone(broker.pid)
    assert broker.process.wait(5 * SCALE) == 0
    assert not list(broker.directory.glob("*.zmq"))


def test_doctor(capsys: Capture) -> None:
    """The simulated device passes each step; without a GPU the failing step and exit code 3."""
    code, out, _err = run(capsys, "doctor", "--device", "simulated")
    assert code == 0
    *steps, device = out.splitlines()
    assert all(line.startswith("✓ ") for line in steps)
    assert device.startswith("device SIM-0 (simulated device (host memory)): ")
    if not platform_steps("broker")[-1].ok:
        code, out, _err = run(capsys, "doctor")
        assert code == NO_PLATFORM_EXIT
        assert out.splitlines()[-1].startswith("✗ ")
        assert "[weight-broker:broker]" in out


# --- what serve refuses -------------------------------------------------------------------------


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """`serve` in this process: what it changes of the process is put back."""
    handlers = list(logging.getLogger("weight-broker").handlers)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    logging.getLogger("weight-broker").handlers[:] = handlers
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def listing(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.rglob("*"))


def serve(capture: Capture, directory: Path, *options: str) -> tuple[int, str, str]:
    """`serve` that is to be refused; nothing may be left or changed in the directory's parent."""
    before = listing(directory.parent)
    device = () if "--device" in options else ("--device", "simulated")
    result = run(capture, "serve", "--dir", str(directory), *device, *options)
    assert listing(directory.parent) == before
    return result


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--name", "a/b"], "'a/b'"),
        (["--name", ""], "name"),
        (["--name", ".."], "name"),
        (["--name", "n" * 65], "name"),
        (["--name", "ümlaut"], "name"),
        (["--memory-limit", "lots"], "'lots'"),
        (["--memory-limit", "0"], "'0': no weights at all would fit"),
        (["--memory-limit", "150%"], "'150%': that is more memory than a device has"),
        (["--memory-limit=-1g"], "'-1g'"),
        (["--memory-limit", "200%"], "'200%'"),
        (["--memory-limit", "nan"], "'nan'"),
        (["--memory-limit", "1e999"], "'1e999'"),
        (["--memory-limit", ""], "''"),
        (["--device", "tpu"], "tpu"),
        (["--dir", ""], "--dir is empty"),
        (["--loader-threads", "0"], "--loader-threads"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_serve_refuses(broker_dir: Path, capsys: Capture, options: list[str], word: str) -> None:
    """Options that mean nothing are bad requests: one sentence, no directory is created."""
    result = serve(capsys, broker_dir / "new", *options)
    check_refused(result, BadRequest.exit_code, word)


def test_serve_with_too_few_descriptors(broker_dir: Path) -> None:
    """A process that may have only a few open is refused before it could run out of them."""
    command = f"ulimit -n 100; exec {sys.executable} -m broker serve --device simulated --dir"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} {broker_dir / 'new'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == BadRequest.exit_code
    assert "may have 100 descriptors open, a broker needs 256 at least" in done.stderr
    assert listing(broker_dir) == []


@pytest.mark.usefixtures("undisturbed")
def test_serve_refuses_a_path_too_long(broker_dir: Path, capsys: Capture) -> None:
    """A directory whose sockets' paths would be too long is told by its length."""
    result = serve(capsys, broker_dir / ("d" * 100))
    check_refused(result, BadRequest.exit_code, "107", "d" * 100)


@pytest.mark.usefixtures("undisturbed")
def test_serve_refuses_a_directory_of_somebody_else(broker_dir: Path, capsys: Capture) -> None:
    """A directory that belongs to another user is refused, and left alone."""
    if os.geteuid() == 0:
        directory = broker_dir / "theirs"
        directory.mkdir(0o700)
        os.chown(directory, NOBODY, NOBODY)
        result = serve(capsys, directory)
        owner = NOBODY
    else:
        result = run(capsys, "serve", "--dir", "/", "--device", "simulated")
        owner = Path("/").stat().st_uid
    check_refused(result, BadRequest.exit_code, f"belongs to uid {owner}")


def make_open(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)


def make_link(directory: Path) -> None:
    directory.with_name("real").mkdir(0o700)
    directory.symlink_to(directory.with_name("real"))


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("prepare", "word"),
    [(make_open, "0755"), (make_link, "symbolic link"), (Path.touch, "not a directory")],
    ids=["open to others", "link", "file"],
)
def test_serve_refuses_an_unsafe_directory(
    broker_dir: Path, capsys: Capture, prepare: Callable[[Path], None], word: str
) -> None:
    """A directory that others can enter, a link or a file is refused and left as it is."""
    directory = broker_dir / "d"
    prepare(directory)
    check_refused(serve(capsys, directory), BadRequest.exit_code, word, str(directory))


@pytest.mark.usefixtures("undisturbed")
def test_serve_refuses_a_relative_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A relative path in the variable would mean another directory to every process."""
    monkeypatch.setenv("WEIGHT_BROKER_DIR", "somewhere")
    result = run(capsys, "serve", "--device", "simulated")
    check_refused(result, BadRequest.exit_code, "WEIGHT_BROKER_DIR='somewhere'")


def test_serve_refuses_what_is_in_the_way(broker_dir: Path) -> None:
    """A file where a socket is to be is left alone, and the sockets made before it are removed."""
    (broker_dir / "default.zmq").write_text("precious")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "broker",
            "serve",
            "--device",
            "simulated",
            "--dir",
            str(broker_dir),
        ],
        capture_output=True,
        text=True,
        timeout=30 * SCALE,
        cwd=ROOT,
        check=False,
    )
    check_refused((done.returncode, done.stdout, done.stderr), BadRequest.exit_code, "default.zmq")
    assert (broker_dir / "default.zmq").read_text() == "precious"
    assert {path.name for path in broker_dir.iterdir()} == {"default.zmq", "default.lock"}


# --- what cannot be preloaded -------------------------------------------------------------------


@pytest.mark.usefixtures("undisturbed")
def test_serve_refuses_to_preload_nothing(
    broker_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A path to preload that is not there ends the start."""
    result = serve(capsys, broker_dir / "new", "--preload", str(tmp_path / "nothing"))
    check_refused(result, NotFound.exit_code, "nothing")


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("files", "word", "error"),
    [
        ([], "it is empty", NotFound),
        (["config.json"], "no safetensors weights", NotFound),
        (["pytorch_model.bin", "model.pt"], "run code", LoadFailed),
    ],
    ids=["empty", "no weights", "pickles"],
)
def test_serve_refuses_to_preload(
    broker_dir: Path,
    tmp_path: Path,
    capsys: Capture,
    files: list[str],
    word: str,
    error: type[BrokerError],
) -> None:
    """A folder without weights, or with pickles only, ends the start with the reason."""
    for name in files:
        (tmp_path / name).write_bytes(b"{}")
    result = serve(capsys, broker_dir / "new", "--preload", str(tmp_path))
    check_refused(result, error.exit_code, word, str(tmp_path))
