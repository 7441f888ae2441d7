"""Draw the chart of README.md from the records in benchmarks/results.

python tools/docs/readme_chart.py    # writes docs/chart.svg
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "docs/chart.svg"
VOCABULARY = "65,536"
OURS, THEIRS, SLOWER = "#2b6cb0", "#a0aec0", "#cbd5e0"


def rows(record: str) -> list[list[Any]]:
    """Return the first table of a record."""
    found = json.loads((ROOT / f"benchmarks/results/{record}.json").read_text(encoding="utf-8"))
    table: list[list[Any]] = found["tables"][0]["rows"]
    return table


def draw() -> Any:
    """Draw memory of an MTP layer and of Megatron's; tokens per second with a trained head and without drafts."""
    pyplot.rcParams |= {"svg.hashsalt": "megatron-mtp", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9.5}
    figure, (memory, decoding) = pyplot.subplots(1, 2, figsize=(8.6, 2.7), layout="constrained")
    layers = [row for row in rows("mtp_memory") if row[0].endswith(VOCABULARY)]
    bars(memory, [f"{row[0].split()[0]} tokens" for row in layers],
         {"megatron-mtp": ([row[1] for row in layers], OURS),
          "Megatron's own MTP": ([row[2] for row in layers], THEIRS)})  # fmt: skip
    memory.set_title(f"MiB that one MTP layer adds, vocabulary {VOCABULARY} (lower is better)")
    trained = rows("serving")
    bars(decoding, [f"{row[0]} at once" if row[0] > 1 else "1 text" for row in trained],
         {"drafting, K auto": ([row[5] for row in trained], OURS),
          "best fixed K": ([row[2] for row in trained], SLOWER),
          "plain": ([row[1] for row in trained], THEIRS)})  # fmt: skip
    decoding.set_title("Tokens per second, quickstart's trained head (higher is better)")
    return figure


def bars(axes: Any, groups: list[str], sides: dict[str, tuple[list[float], str]]) -> None:
    """Draw a group of bars per setting and a bar per side, each with its value above it."""
    width = 0.8 / len(sides)
    for place, (name, (values, color)) in enumerate(sides.items()):
        at = [group + (place - (len(sides) - 1) / 2) * width for group in range(len(groups))]
        axes.bar_label(axes.bar(at, values, width, label=name, color=color), fmt="{:.3g}", fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_yticks([])
    axes.margins(y=0.25)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=len(sides), loc="upper left")


if __name__ == "__main__":
    draw().savefig(CHART, metadata={"Date": None})
