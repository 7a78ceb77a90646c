"""What the examples have in common: a broker, processes that do one step at a time, the device."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NoReturn

EXIT_INTERRUPTED = 130

_CONTEXT = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Have these imported once, before any `Process` is started, and not by each of them."""
    _CONTEXT.set_forkserver_preload(["torch", "engine_client.client", *modules])


preload()

# Until `run_main` nothing has to be put in order, and an import that is interrupted would say so
# with a traceback. A process that an example has started was started with Ctrl-C held back.
signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(EXIT_INTERRUPTED))
IS_CHILD = signal.SIGINT in signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

from broker import UnsupportedPlatformForIPCError, check_ipc_platform_support  # noqa: E402
from broker.checkpoints.files import open_checkpoint  # noqa: E402
from engine_client import BrokerError  # noqa: E402


def run_main(main: Callable[[], None]) -> NoReturn:
    """Run an example's `main`: a mistake ends it with a sentence, Ctrl-C with a word.

    Ctrl-C just ends a process that an example has started.
    """
    try:
        if not IS_CHILD:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except BrokerError as error:
        print(error.sentence, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)


@contextmanager
def held_back() -> Iterator[None]:
    """No Ctrl-C meanwhile, and not for a process that is started meanwhile."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def choose_device() -> str:
    """A GPU if there is one; else show the refusal as a user gets it, and simulate."""
    try:
        check_ipc_platform_support(where="broker")
        return "auto"
    except UnsupportedPlatformForIPCError:
        print("$ weight-broker serve", flush=True)
        with held_back():
            refused = subprocess.run([sys.executable, "-m", "broker", "serve"], check=False)
        print(f"(exit code {refused.returncode})")
        print(
            "\nThat is what the product does on this machine. This is a demonstration, so it goes "
            "on with\nthe simulated device: host memory in place of a GPU's, everything else real."
            "\n",
            flush=True,
        )
        return "simulated"


def check_model(path: str) -> None:
    """End with a sentence unless there is a checkpoint that can be shared and built."""
    try:
        open_checkpoint(path).close()
    except BrokerError as error:
        print(f"--model {path}: {error.sentence}", file=sys.stderr)
        sys.exit(error.exit_code)
    if not (Path(path) / "config.json").exists():
        sys.exit(f"--model {path}: there is no config.json that says which model to build")


def torch_name(device: str) -> str:
    """What torch calls the device, made ready for work: on a GPU that costs time and memory.

    One thread for each process, for there are several.
    """
    import torch

    torch.set_num_threads(1)
    name = "cpu" if device == "simulated" else "cuda"
    torch.zeros(1, device=name)
    return name


@contextmanager
def running_broker(device: str, folder: Path, *options: str) -> Iterator[None]:
    """`weight-broker serve`, stopped in order at the end, after every `Process` that is left."""
    log = folder / "broker.log"
    where = ("--device", device, "--dir", str(folder))
    broker: subprocess.Popen[str] | None = None
    try:
        with log.open("w") as stderr, held_back():
            broker = subprocess.Popen(
                [sys.executable, "-m", "broker", "serve", *where, *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert broker.stdout is not None  # noqa: S101 - it is a pipe
        ready = broker.stdout.readline()
        if not ready:
            raise SystemExit(log.read_text())
        print(ready.strip(), flush=True)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
        for process in Process.started:
            process.kill()
        if broker is not None:
            broker.terminate()
            broker.wait()


class Process:
    """A process of an example, by itself: it does `work`, step by step as it is told to.

    All are forked from one that has imported torch, so that torch is imported once in an example.
    """

    started: ClassVar[list[Process]] = []

    def __init__(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self._link, theirs = _CONTEXT.Pipe()
        given = (theirs, work, arguments)
        self.process = _CONTEXT.Process(target=_begin, args=given, daemon=True)
        resource_tracker.ensure_running()  # which lets Ctrl-C through: before it is held back
        with held_back():
            forkserver.ensure_running()
        self.process.start()
        self.started.append(self)
        theirs.close()
        self.go()  # and not before it is known here: Ctrl-C may have come into its start

    def hear(self) -> dict[str, Any]:
        """Wait for what it says next with `say`."""
        try:
            facts: dict[str, Any] = self._link.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            if self.process.exitcode == EXIT_INTERRUPTED:
                raise KeyboardInterrupt from None  # ours comes as well, or was meant
            said = f"{self.name} ended with exit code {self.process.exitcode}"
            raise SystemExit(said) from None
        return facts

    def go(self) -> None:
        """Let it do the next step: it waits for that. If it has ended, `hear` says so."""
        with suppress(ConnectionError):
            self._link.send(None)

    def end(self) -> None:
        """Let it end by itself, which it does when it waits for the next step."""
        self._link.close()
        self.process.join()

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self.process.kill()
        self.process.join()


# --- in a process of an example -----------------------------------------------------------------

_parent: Connection


def _begin(link: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    global _parent
    _parent = link
    with suppress(EOFError, ConnectionError):  # nobody has a next step for it
        wait_to_go()
        run_main(partial(work, *arguments))


def say(**facts: Any) -> None:
    """Tell whoever started this process."""
    _parent.send(facts)


def wait_to_go() -> None:
    """Wait until whoever started this process lets it do the next step; end if there is none."""
    _parent.recv()


def steps() -> Iterator[None]:
    """One turn for each step that this process is let do."""
    with suppress(EOFError, ConnectionError):
        while True:
            yield _parent.recv()
