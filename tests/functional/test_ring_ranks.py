"""Drafters under context parallelism with ring attention (ring_worker.py), in float64."""

import json
from collections.abc import Sequence
from pathlib import Path

import launch
import pytest
from tiers import tiered

from megatron_mtp.spec.kinds import DRAFTERS

WORKER = Path(__file__).parents[1] / "support" / "ring_worker.py"
CASES = [
    *(f"{kind} {form}" for kind in DRAFTERS for form in ("rows", "packed")),
    *("eagle rows window", "eagle3 packed latent", "dflash packed window sinks", "dspark rows sinks"),
    *("domino rows window", "peagle packed window", "dspark packed blocks", "peagle rows blocks"),
]
FEW = ("eagle rows window", "dflash packed window sinks")


@pytest.mark.parametrize(("ranks", "cases"), tiered([(2, CASES), (4, CASES), (4, FEW)], [(4, FEW)]))
def test_gathered_and_ring_keys_give_the_same_drafter_gradients(
    ranks: int, cases: Sequence[str], tmp_path: Path
) -> None:
    """The loss and all gradients, summed over the ranks."""
    worker = launch.torchrun(ranks, WORKER, str(tmp_path / "found.json"), *cases)
    launch.run(worker, tmp_path / "log")
    assert json.loads((tmp_path / "found.json").read_text()) == {case: [] for case in cases}
