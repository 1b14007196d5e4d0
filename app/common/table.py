"""Tables of rows, for the terminal."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

Row = dict[str, Any]  # values by column name

FORMATS = {
    "tokens/s": "{:.1f}",
    "accepted": "{:.0%}",
}


def table(rows: list[Row], title: str | None = None) -> Table:
    """Return a table with a column per key of the rows, without keys whose values are lists or
    None throughout.
    """
    shown = Table(title=title)
    keys = [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if not all(isinstance(row.get(key), list | None) for row in rows)
    ]
    for key in keys:
        shown.add_column(key, justify="left" if isinstance(rows[0].get(key), str) else "right")
    for row in rows:
        shown.add_row(*(cell(row.get(key), FORMATS.get(key, "{:.2f}").format) for key in keys))
    return shown


def cell(value: Any, form: Callable[[float], str]) -> str:
    """Return the printed form of a value; of a spread the median with its range."""
    if isinstance(value, dict):
        return f"{form(value['median'])} ({form(value['lowest'])}-{form(value['highest'])})"
    if isinstance(value, float):
        return form(value)
    return "" if value is None else str(value)
