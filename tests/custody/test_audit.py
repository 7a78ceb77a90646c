"""The accounting invariant notices what it is there for, and says it in numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.custody.audit import check_invariant
from broker.custody.states import State
from tests.custody.desk import DEVICE, Desk, source


def two_sets() -> Desk:
    """Set 1, named and leased by session 1, and set 2, which is being written for session 3."""
    desk = Desk()
    desk.load(1, name="m")
    loader = desk.start(source(2, "shape-b"))
    desk.reserve(loader.session, 200)
    return desk


def leak_bytes(desk: Desk) -> None:
    desk.books.budgets[DEVICE].free -= 10


def spend_too_much(desk: Desk) -> None:
    desk.set(2).nbytes += 800
    desk.books.budgets[DEVICE].free -= 800


def lose_a_lease(desk: Desk) -> None:
    desk.set(1).leases.clear()


def lose_a_holder(desk: Desk) -> None:
    del desk.books.sessions[1]


def lose_a_claim(desk: Desk) -> None:
    desk.books.sessions[4].claims.clear()


def lose_a_waiter(desk: Desk) -> None:
    desk.set(2).waiters.clear()


def lose_a_writer(desk: Desk) -> None:
    desk.set(2).writer = None
    desk.books.sessions[4].claims.clear()


def keep_an_absent_set(desk: Desk) -> None:
    desk.set(2).state = State.ABSENT
    desk.books.budgets[DEVICE].free += 200


def seal_too_early(desk: Desk) -> None:
    desk.set(2).state = State.SEALED


def forget_to_free(desk: Desk) -> None:
    desk.release(1)
    desk.set(1).state = State.DRAINING


def forget_the_superseded(desk: Desk) -> None:
    desk.release(1)
    desk.set(1).superseded = True


def forget_files(desk: Desk) -> None:
    desk.set(1).identities.clear()


def forget_a_name(desk: Desk) -> None:
    desk.set(1).generations.clear()


def count_a_generation_twice(desk: Desk) -> None:
    (members,) = desk.books._lines.values()
    members.append(1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (leak_bytes, r"device GPU-0: {'reserved': 200, 'leased': 100, 'idle': 0, 'free': 690} do"),
        (spend_too_much, r"'free': -100} do not add up to the limit of 1000"),
        (lose_a_lease, r"disagree on leases: {\(1, 'w', 1\)}"),
        (lose_a_holder, r"disagree on leases: {\(1, 'w', 1\)}"),
        (lose_a_claim, r"disagree on claims: {\(4, 'load', 2\)}"),
        (lose_a_waiter, r"disagree on waiting requests: {\(3, 'w', 4\)}"),
        (lose_a_writer, r"set 2 \(reserving\) has the writer None"),
        (keep_an_absent_set, r"set 2 \(absent\) is on the books though it is absent"),
        (seal_too_early, r"set 2 \(sealed\) has waiters \[4\]"),
        (forget_to_free, r"set 1 \(draining\) has no lease left and was not freed"),
        (forget_the_superseded, r"set 1 \(sealed\) is superseded, nobody leases it, and it was"),
        (forget_files, r"index and sets disagree on files: "),
        (forget_a_name, r"index and sets disagree on lines: "),
        (count_a_generation_twice, r"has the sets \[1, 1\] under the labels \['1', '1'\]"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_the_invariant_notices(fault: Callable[[Desk], None], said: str) -> None:
    """Books that lost or invented something are found out."""
    desk = two_sets()
    check_invariant(desk.books)
    fault(desk)
    with pytest.raises(AssertionError, match=said):
        check_invariant(desk.books)
