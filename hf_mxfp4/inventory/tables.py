"""Text for people: tables and sizes."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB")


def table(lines: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Lines of cells, the first of them the header, in columns of equal width.

    Args:
        lines: each with the same number of cells.
        right: the columns that are set to the right.
    """
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def cell(i: int, text: str) -> str:
        return text.rjust(widths[i]) if i in right else text.ljust(widths[i])

    return "\n".join("  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines)


def size(count: int) -> str:
    """A number of bytes, in powers of a thousand."""
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), 0
    while value >= 999.9995 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3f} {_UNITS[unit]}"
