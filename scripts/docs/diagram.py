"""The states of a weight set as a picture, from the table: a browser need fetch nothing to draw it.

States stand in a row, in the table's order. What leads to the next one is a straight arrow; what
leads further is an arc, above the row, or below it if it leads to the first; what stays is written
into the state.
"""

from __future__ import annotations

from broker.custody.states import TABLE, State

STEP, WIDTH, HEIGHT = 160, 112, 44
"""Between the middles of neighbours; of a state's box."""
_MIDDLE_Y = 120
_LOWEST_Y = 330
_ARC = 34
"""How much further out an arc is for each state that it passes."""
_ROW = list(TABLE)
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z"/></marker>'
)


def svg() -> str:
    """The picture as one element; docs/assets/site.css has its colours."""
    arrows = [_arrow(*each) for each in moves() if each[0] is not each[1]]
    width = STEP * len(_ROW)
    parts = [_HEAD, *map(_box, _ROW), *arrows]
    return (
        f'<svg class="states" viewBox="0 0 {width} {_LOWEST_Y}" role="img" '
        f'aria-label="States of a weight set">{"".join(parts)}</svg>'
    )


def moves() -> list[tuple[State, State, str]]:
    """From, to, and what leads there."""
    return [
        (
            state,
            following,
            ", ".join(trigger.value for trigger, to in row.items() if to is following),
        )
        for state, row in TABLE.items()
        for following in dict.fromkeys(row.values())
    ]


def _middle(state: State) -> int:
    return STEP * _ROW.index(state) + STEP // 2


def _box(state: State) -> str:
    x = _middle(state)
    stays = [why for here, to, why in moves() if here is to is state]
    left, top = x - WIDTH // 2, _MIDDLE_Y - HEIGHT // 2
    box = f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
    name = (
        f'<text class="state" x="{x}" y="{_MIDDLE_Y - (4 if stays else -4)}">{state.value}</text>'
    )
    inside = "".join(
        f'<text class="label" x="{x}" y="{_MIDDLE_Y + 13}">↻ {why}</text>' for why in stays
    )
    return box + name + inside


def _arrow(start: State, end: State, why: str) -> str:
    distance = _ROW.index(end) - _ROW.index(start)
    if abs(distance) == 1 and end is not _ROW[0]:
        return _straight(start, end, why)
    side = 1 if end is _ROW[0] else -1
    depth = (HEIGHT // 2 + _ARC * abs(distance)) * side
    # Arcs that end at one state end side by side, the outermost last, so that none cross.
    x1, x2 = _middle(start), _middle(end) - 8 * (abs(distance) - 3)
    y = _MIDDLE_Y + side * HEIGHT // 2
    turn = f"C{x1} {y + depth} {x2} {y + depth} {x2} {y}"
    return _path(f"M{x1} {y}{turn}", (x1 + x2) // 2, y + round(0.75 * depth) + 4, why)


def _straight(start: State, end: State, why: str) -> str:
    forward = 1 if _middle(end) > _middle(start) else -1
    y = _MIDDLE_Y - 6 * forward
    x1 = _middle(start) + forward * WIDTH // 2
    x2 = _middle(end) - forward * WIDTH // 2
    return _path(f"M{x1} {y}L{x2} {y}", (x1 + x2) // 2, y - 6 if forward > 0 else y + 14, why)


def _path(path: str, x: int, y: int, why: str) -> str:
    label = f'<text class="label" x="{x}" y="{y}">{why}</text>'
    return f'<path d="{path}" marker-end="url(#head)"/>{label}'
