"""checkpoint/convert/live.py: ranks' weights are exported with the names and bits that mcore-to-hf writes."""

import pytest
from records import Records
from tiers import tiered

CASES = [
    ("untied-d1", "tp2-pp2"),
    ("latent-d2", "pp2"),
    ("moe-d1", "ep2"),
    ("tied-d1", "tp2"),
    ("moe-alltoall-d1", "pp2-ep2"),
]


@pytest.mark.parametrize(("model", "layout"), tiered(CASES, (("tied-d1", "tp2"),)))
def test_every_rank_gets_the_weights_of_a_converted_checkpoint(records: Records, model: str, layout: str) -> None:
    record = records.of(f"export/{model}/{layout}")
    assert not any(record["differing"]), record["differing"]
    assert max(record["peak"]) <= record["most"] < record["bytes"]
    own = {name for name in record["drafts"] if name.startswith("model.layers.")}
    assert "model.embed_tokens.weight" in record["drafts"]
    assert own
    assert ("lm_head.weight" in record["drafts"]) == model.startswith("untied")
    assert set(record["drafts"]) < set(record["names"])
