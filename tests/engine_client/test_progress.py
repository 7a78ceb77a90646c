"""What a call that waits shows, and what its time-out says."""

from __future__ import annotations

import io

import pytest

from broker.wire import Progress
from engine_client.progress import progress_printer
from engine_client.stage import Stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_on_a_terminal() -> None:
    """A stage without a known end by its name, one with an end as a bar that ends its line."""
    terminal = Terminal()
    show = progress_printer("m", terminal)
    show(Progress("building", 0, 0))
    show(Progress("copying", 1, 2))
    show(Progress("copying", 2, 2))
    half, whole = "#" * 15 + " " * 15, "#" * 30
    assert terminal.getvalue() == (
        f"\rm: building\rm: copying [{half}]  50%\rm: copying [{whole}] 100%\n"
    )


def test_nothing_anywhere_else() -> None:
    """A log is not filled with bars."""
    stream = io.StringIO()
    progress_printer("m", stream)(Progress("copying", 1, 2))
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
