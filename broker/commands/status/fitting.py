"""Which columns of a table a terminal has room for, and how wide they may be."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from broker.commands.status.tables import Column, Table

GAP = 2
"""Cells between columns."""


def fit(table: Table, width: int) -> tuple[list[list[str]], list[str]]:
    """The lines of a table, header first, as cells of equal width within each column.

    Columns that need not be there and have nothing to say are left away, then those for which
    there is no room. Whatever is cut ends with an ellipsis.

    Returns:
        The lines, and the names of the columns for which there was no room.
    """
    columns = table.columns
    kept = [
        index
        for index, column in enumerate(columns)
        if not column.rank or any(row[index] != "-" for row in table.rows)
    ]
    wanted = list(kept)
    while _least(table, kept) > width:
        droppable = [index for index in kept if columns[index].rank]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda index: columns[index].rank))
    widths = _widths(table, kept, width)
    header = [column.name for column in columns]
    lines = [
        [_cell(row[index], widths[index], columns[index]) for index in kept]
        for row in (header, *table.rows)
    ]
    return lines, [header[index] for index in wanted if index not in kept]


def _natural(table: Table, index: int) -> int:
    cells = [table.columns[index].name, *(row[index] for row in table.rows)]
    return max(map(cell_len, cells))


def _narrowest(table: Table, index: int) -> int:
    least, natural = table.columns[index].least, _natural(table, index)
    return natural if least is None else min(least, natural)


def _least(table: Table, kept: Sequence[int]) -> int:
    return sum(_narrowest(table, index) for index in kept) + GAP * (len(kept) - 1)


def _widths(table: Table, kept: Sequence[int], width: int) -> dict[int, int]:
    """What is left over goes to the columns that can use it, a cell at a time."""
    widths = {index: _narrowest(table, index) for index in kept}
    spare = width - _least(table, kept)
    wanting = [index for index in kept if widths[index] < _natural(table, index)]
    while spare > 0 and wanting:
        for index in wanting[:spare]:
            widths[index] += 1
            spare -= 1
        wanting = [index for index in wanting if widths[index] < _natural(table, index)]
    return widths


def _cell(text: str, width: int, column: Column) -> str:
    if cell_len(text) > width:
        return set_cell_size(text, width - 1).rstrip() + "…" if width > 1 else text[:width]
    padding = " " * (width - cell_len(text))
    return padding + text if column.right else text + padding
