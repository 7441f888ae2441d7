"""The plot of a run: loss and acceptance by depth over training steps, from metrics.jsonl.

Test data, on which a run is evaluated once at its end, is left out.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

from megatron_mtp.files import written_beside

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot_metrics(source: Path, target: Path) -> None:
    """Draw `source` (metrics.jsonl) into `target` (PNG); an existing plot is replaced when the new one is whole."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line]
    splits = dict.fromkeys(row["split"] for row in rows if row["split"].startswith("validation"))
    evaluations = {split: [row for row in rows if row["split"] == split] for split in splits}
    figure, (loss_axes, acceptance_axes) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names = sorted({name for row in rows for name in row if name.endswith(" loss")})
    for index, name in enumerate(names):
        _line(loss_axes, [row for row in rows if row["split"] == "training"], name, f"C{index}", alpha=0.5)
        for split, of_split in evaluations.items():
            _line(loss_axes, of_split, name, f"C{index}", marker="o", label=f"{name} ({split})")
    loss_axes.set(title="loss by depth", xlabel="step", ylabel="nats per token")
    conditional = sorted({name for row in rows for name in row if name.endswith(" conditional acceptance")})
    for index, given in enumerate(conditional):
        for name, style in ((given.replace("conditional ", ""), "-"), (given, ":")):
            for split, of_split in evaluations.items():
                known = [row for row in of_split if given in row]
                look = {"marker": "o", "linestyle": style, "label": f"{name} ({split})"}
                _line(acceptance_axes, known, name, f"C{index + 1}", **look)
    acceptance_axes.set(title="acceptance by depth (dotted: conditional)", xlabel="step", ylabel="rate", ylim=(0, 1))
    for axes in (loss_axes, acceptance_axes):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    try:
        with written_beside(target) as beside:
            figure.savefig(beside, dpi=120, format="png")
    finally:
        plt.close(figure)


def _line(axes: Any, rows: list[dict[str, Any]], name: str, color: str, **style: Any) -> None:
    points = {row["iteration"]: row[name] for row in rows if name in row}  # of rows of one step, the last
    if points:
        axes.plot(points.keys(), points.values(), color=color, **style)
