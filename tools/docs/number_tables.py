"""Write the tables of `PAGES` from the records in benchmarks/results.

A record is the last line that a benchmark prints, or the one of `megatron-mtp doctor --kernels --json`.

    python benchmarks/train_step.py | tail -n 1 > benchmarks/results/train_step.json
    python tools/docs/number_tables.py

A page has a table between `<!-- benchmarks/results/NAME.json, table 1 -->` and `<!-- end -->`. The first table
of docs/explanation/evidence.md, between `<!-- summary -->` and `<!-- end -->`, has a row for each of `SUMMARY`,
computed from the same records and from the tables of docs/explanation/evidence_gpu.md.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / f"docs/{name}.md"
    for name in (
        "explanation/evidence",
        "explanation/evidence_drafting",
        "explanation/evidence_heads",
        "explanation/evidence_losses",
        "explanation/evidence_recipes",
        "explanation/evidence_cached_states",
        "extensions/kernels",
    )
]
MARKS = re.compile(r"(<!-- (benchmarks/results/\w+\.json), table (\d+) -->\n).*?(<!-- end -->)", re.DOTALL)
SUMMARIZED = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.DOTALL)
ALL_ACCEPTED = "random weights, every draft accepted"


def updated(page: str) -> str:
    """Return a page with the records' tables between the marks."""
    page = SUMMARIZED.sub(lambda mark: f"{mark[1]}{summary()}\n{mark[2]}", page)
    return MARKS.sub(lambda mark: f"{mark[1]}{written(mark[2], int(mark[3]))}\n{mark[4]}", page)


def written(record: str, number: int) -> str:
    """Return a table of a record, counted from 1, as Markdown."""
    found = table(record, number)
    return markdown(found["header"], found["rows"])


def table(record: str, number: int = 1) -> dict[str, Any]:
    """Return a table of a record, counted from 1: header and rows."""
    found: dict[str, Any] = json.loads((ROOT / record).read_text(encoding="utf-8"))["tables"][number - 1]
    return found


def markdown(header: list[Any], rows: list[list[Any]]) -> str:
    sys.path.append(str(ROOT))
    from benchmarks.harness import Table

    return "\n".join(Table("", header, rows).markdown())


def rows_of(name: str, number: int = 1) -> list[list[Any]]:
    """Return the rows of a record's table."""
    rows: list[list[Any]] = table(f"benchmarks/results/{name}.json", number)["rows"]
    return rows


def span(values: list[float], digits: int = 2) -> str:
    """Return the smallest and the largest value."""
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return least if least == most else f"{least} to {most}"


def training_step() -> str:
    rows = rows_of("train_step")
    memory = [ours / theirs for *_, ours, theirs in rows]
    return f"{span([row[3] for row in rows])} of its time, {span(memory)} of its memory"


def memory_of_a_layer() -> str:
    rows = [row for row in rows_of("mtp_memory") if row[0].endswith("65,536")]
    return f"{span([row[3] for row in rows])} of Megatron's"


def drafting(name: str, texts: int) -> str:
    """Return the rate of automatic K and of the best fixed K relative to plain decoding."""
    _, plain, best, count, length, auto, _ = next(row for row in rows_of(name) if row[0] == texts)
    return f"{best / plain:.2f} times with {count} (accepted length {length}), {auto / plain:.2f} with K auto"


def attached() -> str:
    ((_, plain, drafted, length, _),) = rows_of("attach_smollm2")
    return f"{drafted / plain:.2f} times with K = 2 (accepted length {length})"


def all_accepted() -> str:
    of_shape = {row[0]: row[2] / row[1] for row in rows_of("decoding")}
    return f"{of_shape['large, float32']:.2f} times in float32, {of_shape['large, bfloat16']:.2f} in bfloat16"


def on_a_gpu() -> str:
    """Read the goals of the part `graphs` in docs/explanation/evidence_gpu.md."""
    page = (ROOT / "docs/explanation/evidence_gpu.md").read_text(encoding="utf-8")
    goal = r"\| drafting: {} \| ([\d.]+) \|"
    found = [
        re.search(goal.format(what), page) for what in (r"the fastest K over.*?", r"with CUDA graphs over without")
    ]
    plain, graphs = (float(one[1]) for one in found if one is not None)
    return f"{plain:.1f} times plain decoding; {graphs:.1f} times as fast with CUDA graphs"


def windows() -> str:
    rows = [[float(cell.split(" ")[0]) for cell in row[1:]] for row in rows_of("windows")]
    (whole, windowed), (last_whole, last_windowed) = rows[3], rows[5]
    return f"{last_windowed / windowed:.2f} and {last_whole / whole:.2f} of that at 2k to 4k"


def trained_on() -> str:
    trials = rows_of("head_life")[:24]
    below = sum(after < before - error for *_, before, after, error, _, _ in trials)
    gain = median(after - before for *_, before, after, _, _, _ in trials)
    return f"{below}, median gain {gain:.2f} tokens a forward"


def layouts() -> str:
    rows = rows_of("test_layouts")
    losses = max(float(row[2]) for row in rows if row[2] != "equal")
    return f"losses within {losses:.1e}, gradients within {max(float(row[3]) for row in rows):.1e}"


HEADS = "[trained layers](evidence_drafting.md#drafting-with-trained-mtp-layers-on-a-cpu)"
QUICKSTART, SMOLLM2 = "the quickstart's own MTP layer", "SmolLM2-135M, an MTP layer by `attach`"
SUMMARY: list[tuple[str, Callable[[], str], str]] = [
    ("a training step against Megatron's own MTP", training_step, "[step](#a-training-step-against-megatrons-own-mtp)"),
    ("memory of an MTP layer with 65,536 entries", memory_of_a_layer, "[depth](#what-an-mtp-layer-costs)"),
    (f"drafting for one request against plain decoding: {SMOLLM2}", attached, HEADS),
    (f"drafting for one request against plain decoding: {QUICKSTART}", lambda: drafting("serving", 1), HEADS),
    (f"sixteen requests at once: {QUICKSTART}", lambda: drafting("serving", 16), HEADS),
    (
        f"upper bound of two drafts: SmolLM2-135M's shape, {ALL_ACCEPTED}",
        all_accepted,
        "[decoding](evidence_drafting.md#decoding-one-text-on-a-cpu)",
    ),
    (f"upper bound on an H200: 16 layers of 2,048, {ALL_ACCEPTED}", on_a_gpu, "[GPU](evidence_gpu.md#graphs)"),
    (
        "accepted length from 8k to 16k, small drafters with a window and without, one seed",
        windows,
        "[windows](evidence_drafting.md#windows-of-drafters-by-context)",
    ),
    (
        "MTP layers of donors, trained further: exports below their graft in 24 trials on tiny trunks",
        trained_on,
        "[further training](evidence_losses.md#mtp-layers-that-are-trained-further)",
    ),
    ("agreement between layouts", layouts, "[layouts](#layouts-against-one-process)"),
]
"""Questions of the first table, their answers from the records, and the sections."""


def summary() -> str:
    """Return the first table of the page."""
    return markdown(["question", "answer", ""], [[what, answer(), where] for what, answer, where in SUMMARY])


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
