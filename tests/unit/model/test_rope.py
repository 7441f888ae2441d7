"""model/rope.py: Megatron's rotary modules at custom positions."""

from collections.abc import Callable

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron_mtp.model.rope import placed

POSITIONS = [0, 1, 2, 9, 3, 4, 39]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RotaryEmbedding(8, 1.0, use_cpu_initialization=True),
        lambda: YarnRotaryEmbedding(8, use_cpu_initialization=True),
    ],
    ids=["rope", "yarn"],
)
def test_rotary_rows_use_the_given_positions_inside_the_context(make: Callable[[], torch.nn.Module]) -> None:
    rotary = make()
    layer = torch.nn.ModuleList([rotary])
    whole = rotary(40)
    with placed(layer, POSITIONS):
        some = rotary(len(POSITIONS))
    if isinstance(whole, tuple):
        assert some[1] == whole[1]
        whole, some = whole[0], some[0]
    assert torch.equal(some, whole[POSITIONS])
    assert len(rotary(40)[0] if isinstance(rotary(40), tuple) else rotary(40)) == 40
