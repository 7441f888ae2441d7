"""losses/mtp_loss.py next to a policy's loss, in Megatron's schedules and every layout.

The MTP gradients match a loop over single rollouts in float64, and the policy's are bit-identical.
"""

import pytest
from records import Records
from tiers import tiered
from torch import Tensor

TOLERANCE = 1e-5
FORMS = ("packed", "padded")


def relative_difference(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("layout", tiered(["single", "tp2", "tp2-sp", "pp2", "cp2", "dp2"], ["single"]))
def test_the_mtp_layers_train_without_changing_the_policy(records: Records, layout: str) -> None:
    """Four microbatches of different lengths, in packed and in padded rows."""
    record, reference = records.of(f"policy/untied-d3/{layout}"), records.of("policy_reference/untied-d3")
    assert {kind: keys for kind, keys in record["trunk"].items() if "joined" not in kind and keys} == {}
    assert all(record["trunk"][f"{form} joined"] for form in FORMS)  # without detaching they differ
    far = {
        (form, loss, key): difference
        for form in FORMS
        for loss, expected in reference.items()
        for key, value in expected.items()
        if not (difference := relative_difference(record["gradients"][f"{form} {loss}"][key], value)) <= TOLERANCE
    }
    assert far == {}
