"""Results of all kernels and losses, as tables and as one object for --json."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from megatron_mtp.common.progress import progress_bar
from megatron_mtp.extensions.kernels.cards import CARDS, H200, Card
from megatron_mtp.extensions.kernels.compiled import ENTRIES, TOKENS, Kernel, kernels, launches, loss_of, names
from megatron_mtp.extensions.kernels.roofline import (
    CALIBRATING,
    HIDDEN,
    SEEN,
    SEEN_POSITIONS,
    Work,
    is_issue_bound,
    seconds_of,
)
from megatron_mtp.losses.linear_cross_entropy import chunks

Table = dict[str, Any]
"""Title, header and rows, as in the files of benchmarks/results."""


def report() -> dict[str, Any]:
    """Return everything for all compute capabilities; takes a minute if Triton's cache is empty."""
    losses, made = names(), list[Kernel]()
    for target in progress_bar(iterable=CARDS, desc="compiled", unit="card"):
        made += kernels(target, losses)
    rate = rate_seen()
    return {
        "triton": version("triton"),
        "products reach": rate,
        "kernels": [figures(kernel) for kernel in made],
        "tables": [_of_kernels(made), _alone(made), _of_losses(losses, rate), _seen(rate)],
    }


def figures(kernel: Kernel) -> dict[str, Any]:
    """Return the results of a kernel, by name."""
    return asdict(kernel) | {"occupancy": kernel.occupancy, "limit": kernel.limit}


def work_of(name: str, positions: int | None = None) -> Work:
    """Return the work of a loss, in chunks of this many positions; None for the present chunk size."""
    products = 4 if loss_of(name).needs_teacher else 3
    at_once = next(chunks(TOKENS, ENTRIES, is_cuda=True)).stop if positions is None else positions
    return Work(products, launches(H200, name), TOKENS, ENTRIES, HIDDEN, at_once)


def rate_seen() -> float:
    """Return the fraction of the peak that products reach on an H200, from the loss that calibrates the model."""
    return work_of(CALIBRATING, SEEN_POSITIONS).reached(CARDS[H200], SEEN[CALIBRATING])


def as_text(found: dict[str, Any]) -> str:
    """Format the tables for a terminal, right-aligned except for the first column."""
    return "\n\n".join(_columns(table) for table in found["tables"])


def _columns(table: Table) -> str:
    cells = [list(table["header"]), *(list(map(str, row)) for row in table["rows"])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    return "\n".join([f"{table['title']}:", *lines])


def _of_kernels(made: Sequence[Kernel]) -> Table:
    def cell(kernel: Kernel) -> str:
        spilled = f", {kernel.spilled} bytes spilled" if kernel.spilled else ""
        return f"{kernel.registers}, {kernel.occupancy:.2f}{spilled}"

    shared = {kernel.name: kernel.shared for kernel in made}
    rows = [[name, most, *(cell(kernel) for kernel in made if kernel.name == name)] for name, most in shared.items()]
    header = ["kernel", "shared bytes", *map(_card, CARDS)]
    return {"title": "Registers of a thread, occupancy, and bytes that spill", "header": header, "rows": rows}


def _alone(made: Sequence[Kernel]) -> Table:
    def cell(kernel: Kernel, card: Card) -> str:
        return f"{1e3 * seconds_of(kernel, card, TOKENS * ENTRIES):.2f}{' i' if is_issue_bound(kernel, card) else ''}"

    of_rows = [kernel for kernel in made if kernel.target == H200 and kernel.block and "drafted" not in kernel.name]
    rows = [
        [kernel.name, kernel.moved, f"{kernel.instructions:.0f}", *(cell(kernel, card) for card in CARDS.values())]
        for kernel in of_rows
    ]
    title = f"Milliseconds of a kernel, {TOKENS:,} tokens x {ENTRIES:,} entries, by a logit's instructions (i) or bytes"
    return {"title": title, "header": ["kernel", "bytes", "instructions", *map(_card, CARDS)], "rows": rows}


def _card(target: int) -> str:
    return f"sm_{target} ({CARDS[target].name})"


def _of_losses(losses: Sequence[str], rate: float) -> Table:
    def row(name: str) -> list[str]:
        work = work_of(name)
        return [name, *(f"{1e3 * work.seconds(card, rate):.1f}" for card in CARDS.values())]

    title = f"Milliseconds of a loss with its products and gradients, hidden size {HIDDEN:,}"
    return {"title": title, "header": ["loss", *map(_card, CARDS)], "rows": list(map(row, losses))}


def _seen(rate: float) -> Table:
    rows = []
    for name, seconds in SEEN.items():
        predicted = work_of(name, SEEN_POSITIONS).seconds(CARDS[H200], rate)
        error = "calibrates" if name == CALIBRATING else f"{predicted / seconds - 1:+.1%}"
        rows.append([name, f"{1e3 * predicted:.1f}", f"{1e3 * seconds:.1f}", error])
    return {"title": "The H200's record, milliseconds", "header": ["loss", "predicted", "seen", "error"], "rows": rows}
