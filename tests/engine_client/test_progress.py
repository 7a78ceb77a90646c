"""What a call that waits shows, and what its time-out says."""

from __future__ import annotations

import contextlib
import io

import pytest

from broker.wire import Progress
from engine_client.progress import shown
from engine_client.stage import Stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_on_a_terminal() -> None:
    """A stage without a known end by its name, one with an end as a bar; the line is ended."""
    terminal = Terminal()
    with shown(None, "m", terminal) as show:
        show(Progress("building", 0, 0))
        show(Progress("copying", 1, 2))
        show(Progress("copying", 2, 2))
    half, whole = "#" * 15 + " " * 15, "#" * 30
    assert terminal.getvalue() == (
        f"\rm: building\rm: copying [{half}]  50%\rm: copying [{whole}] 100%\n"
    )


def test_a_line_that_breaks_off() -> None:
    """A failure is told on a line of its own, and a shorter text leaves nothing of a longer one."""
    terminal = Terminal()
    with contextlib.suppress(ValueError), shown(None, "m", terminal) as show:
        show(Progress("reading it all", 0, 0))
        show(Progress("copying", 0, 0))
        raise ValueError("broken")
    assert terminal.getvalue() == "\rm: reading it all\rm: copying       \n"


def test_nothing_to_tell() -> None:
    """What was resident draws no line, and ends none."""
    terminal = Terminal()
    with shown(None, "m", terminal):
        pass
    assert terminal.getvalue() == ""


def test_a_callback_of_ones_own() -> None:
    """It gets what comes, and nothing is drawn."""
    seen: list[Progress] = []
    terminal = Terminal()
    with shown(seen.append, "m", terminal) as show:
        show(Progress("copying", 1, 2))
    assert (seen, terminal.getvalue()) == ([Progress("copying", 1, 2)], "")


def test_nothing_anywhere_else() -> None:
    """A log is not filled with bars."""
    stream = io.StringIO()
    with shown(None, "m", stream) as show:
        show(Progress("copying", 1, 2))
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (None, "waiting for the weights"),
        (Progress("building", 0, 0), "waiting for the weights (building)"),
        (Progress("copying", 1, 2), "waiting for the load (copying, 1 of 2 bytes)"),
    ],
)
def test_what_a_time_out_names(progress: Progress | None, said: str) -> None:
    """The last thing that was heard."""
    seen: list[Progress] = []
    stage = Stage("the weights", seen.append)
    if progress is not None:
        stage.on_progress(progress)
        assert seen == [progress]
    assert str(stage) == said
