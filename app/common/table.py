"""Tables of rows, for the terminal."""

from typing import Any

from rich.table import Table

Row = dict[str, Any]  # values by column name

FORMATS = {"tokens/s": "{:.1f}", "accepted": "{:.0%}"}  # by column


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
        shown.add_row(*(cell(row.get(key), FORMATS.get(key, "{:.2f}")) for key in keys))
    return shown


def cell(value: Any, form: str) -> str:
    """Return a value in the ``form`` of its column; of a spread, which has a ``median``, a
    ``lowest`` and a ``highest``, the median with its range.
    """
    if isinstance(value, dict):
        return f"{form} ({form}-{form})".format(value["median"], value["lowest"], value["highest"])
    if isinstance(value, float):
        return form.format(value)
    return "" if value is None else str(value)
