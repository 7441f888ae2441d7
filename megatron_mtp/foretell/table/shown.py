"""Rows of the table for a terminal."""

from typing import Any

Row = dict[str, Any]
NONE = "-"


def text_of(rows: list[Row], failed: list[dict[str, str]]) -> str:
    """The rows in columns, and a line for every checkpoint without one."""
    engines = list(dict.fromkeys(name for row in rows for name in row["foretold"]))
    head = ["checkpoint", "family", "depths", "objective", "K", "acceptance, %", "accepted length", *engines]
    table = [head, *(_cells(row, engines) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines += [f"no row: {one['checkpoint']}: {one['reason']}" for one in failed]
    return "\n".join(lines)


def _cells(row: Row, engines: list[str]) -> list[str]:
    rates = " ".join(f"{100 * rate:.1f}" for rate in row["acceptance"])
    foretold = [row["foretold"].get(name, {}).get("accepted_length") for name in engines]
    return [
        row["checkpoint"],
        row["family"] or NONE,
        str(row["depths"]),
        row["objective"],
        str(row["drafts"]),
        rates or NONE,
        f"{row['accepted_length']:.3f}",
        *(NONE if length is None else f"{length:.3f}" for length in foretold),
    ]
