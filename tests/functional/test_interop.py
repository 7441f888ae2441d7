"""Checkpoints move between Megatron's own MTP and ours in both directions without a converter."""

import pytest
from layouts import MEGATRONS_OWN
from records import Records
from tiers import tiered
from torch import equal

FIRST = ("moe-alltoall-d3",)


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name in FIRST else pytest.mark.matrix) for name in MEGATRONS_OWN]
)
@pytest.mark.parametrize("saved_by", tiered(["megatron", "ours"], ("megatron",)))
def test_we_and_megatron_read_the_same_weights_and_losses(records: Records, model: str, saved_by: str) -> None:
    ours = records.of(f"forward/{model}/ours/{saved_by}")
    megatron = records.of(f"forward/{model}/megatron/{saved_by}")
    assert ours["losses"] == pytest.approx(megatron["losses"], rel=1e-6)
    assert ours["weights"].keys() == megatron["weights"].keys()
    assert [name for name, weight in ours["weights"].items() if not equal(weight, megatron["weights"][name])] == []
    assert any(name.startswith("mtp.layers.0.transformer_layer.") for name in ours["weights"])
