"""model/shared_keys.py: what a later pass attends to, by a plain loop; how models with it draft and are stored.

test_drafting.py tests that drafts match the training forward pass, test_packed.py packed rows, and
tests/functional/test_layouts.py layouts.
"""

from argparse import Namespace

import pytest
import torch
from drafting_single import model_of, runner_of, trained_forward
from megatron.core.transformer.enums import AttnMaskType
from megatron_single import transformer_config
from torch import Tensor

from megatron_mtp.checkpoint.convert.import_hf import pass_keys, set_passes
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.model.shared_keys import SharingAttention, sharing

LENGTH, ROWS, HEADS, GROUPS, CHANNELS, PASSES = 6, 2, 4, 2, 8, 4


def plain(query: Tensor, passes: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the newest pass by a loop over rows, heads and positions, [S, B, N * C].

    Position 2 of pass 3 attends to pass 1 at 0, 1 and 2, to pass 2 at 2, and to itself.
    """
    attended = torch.zeros(LENGTH, ROWS, HEADS, CHANNELS, dtype=query.dtype)
    for position in range(LENGTH):
        seen = [(0, earlier) for earlier in range(position + 1)]
        seen += [(number, position) for number in range(1, len(passes))]
        for row in range(ROWS):
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                keys, values = (torch.stack([passes[n][part][at, row, group] for n, at in seen]) for part in (0, 1))
                weights = (keys @ query[position, row, head] / CHANNELS**0.5).softmax(0)
                attended[position, row, head] = weights @ values
    return attended.flatten(2)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_pass_attends_to_pass_1_up_to_its_position_and_its_chain(has_mask: bool) -> None:
    layer = SharingAttention(transformer_config(1), 1, AttnMaskType.causal, "self")
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not() if has_mask else None
    generator, passes = torch.Generator().manual_seed(3), []
    inputs, ours, expected = [], [], []
    with sharing([layer]):
        for _ in range(PASSES):
            shapes = [(LENGTH, ROWS, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
            query, key, value = (torch.randn(one, generator=generator).double().requires_grad_() for one in shapes)
            inputs += [query, key, value]
            passes.append((key, value))
            ours.append(layer(query, key, value, mask))
            expected.append(plain(query, passes))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(PASSES, LENGTH, ROWS, HEADS * CHANNELS, generator=generator).double()
    found, wanted = (torch.autograd.grad((torch.stack(each) * upstream).sum(), inputs) for each in (ours, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    query, key, value = inputs[:3]
    torch.testing.assert_close(layer(query, key, value, mask), ours[0])  # nothing is stored outside of `sharing`


@pytest.mark.usefixtures("megatron")
def test_a_context_parallel_rank_attends_to_all_earlier_positions() -> None:
    """Context parallelism: a rank has positions 0 1 4 5, and the keys of all six."""
    layer, own = SharingAttention(transformer_config(1), 1, AttnMaskType.causal, "self"), torch.tensor([0, 1, 4, 5])
    generator = torch.Generator().manual_seed(4)
    shapes = [(LENGTH, ROWS, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS, GROUPS, GROUPS)]
    query, key, value, second_key, second_value = (torch.randn(one, generator=generator).double() for one in shapes)
    expected = plain(query, [(key, value), (second_key, second_value)])[own]
    found = layer._attend(query[own], key, value, own, None, [(second_key[own], second_value[own])])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("megatron")
def test_chain_scores_are_not_rounded_to_half_precision() -> None:
    """Rounded to bfloat16, they would increase the error of the weights tenfold."""
    layer, generator = SharingAttention(transformer_config(1), 1, AttnMaskType.causal, "self"), torch.Generator()
    generator.manual_seed(5)

    def drawn(heads: int) -> Tensor:
        return torch.randn(LENGTH, ROWS, heads, CHANNELS, generator=generator)

    key = drawn(GROUPS)
    query = 10 * key.repeat_interleave(HEADS // GROUPS, dim=2) + drawn(HEADS) / 2
    inputs = query, key, torch.zeros_like(key), key + drawn(GROUPS) / 4, torch.ones_like(key)
    query, key, value, second_key, second_value = (one.bfloat16() for one in inputs)
    found = layer._attend(query, key, value, None, None, [(second_key, second_value)])
    passes = (key, value), (second_key, second_value)
    expected = plain(query.double(), [(one.double(), other.double()) for one, other in passes])
    assert (found - expected).abs().mean() < 0.002


@pytest.mark.usefixtures("megatron")
def test_a_model_with_shared_kv_drafts_with_mtp_eagle_only() -> None:
    runner = runner_of("shared")
    assert make_method(runner, config_from({"method": "mtp_eagle"}), Sampling()).count == 3
    with pytest.raises(ValueError, match=r"'mtp' drafts at most 1 .*; give at most 1, .* mtp_eagle"):
        make_method(runner, config_from({"method": "mtp", "num_speculative_tokens": 2}), Sampling())


@pytest.mark.usefixtures("megatron")
def test_attention_that_cannot_share_keys_is_rejected() -> None:
    model = model_of("shared")
    model.mtp._sharing = []  # as with Transformer Engine, whose attention is not ours
    with pytest.raises(ValueError, match="--mtp-repeated-layer-shares-kv, which Transformer Engine's"):
        trained_forward(model, [1, 2, 3, 4])


@pytest.mark.usefixtures("megatron")
def test_weights_are_those_of_any_repeated_layer() -> None:
    shared, repeated = (model_of(kind).state_dict() for kind in ("shared", "repeated"))
    assert shared.keys() == repeated.keys()


def test_a_folder_records_that_passes_share_keys() -> None:
    trained = Namespace(
        **{"mtp_num_layers": 1, "mtp_use_repeated_layer": True, "mtp_unroll": 5},
        **{"mtp_repeated_layer_shares_kv": True, "mtp_repeated_layer_first_pass_kv": False},
    )
    keys = pass_keys(trained)
    assert keys == {"mtp_unroll": 5, "mtp_repeated_layer_shares_kv": True}
    back = Namespace(mtp_num_layers=1)
    set_passes(back, HFConfig.from_keys({"model_type": "glm4_moe", **keys}))
    assert vars(back) == vars(trained)
    index, first = "index_share_for_mtp_iteration", "mtp_repeated_layer_first_pass_kv"
    trained = Namespace(**{**vars(trained), "mtp_repeated_layer_shares_kv": False, first: True})
    keys = pass_keys(trained)
    assert keys == {"mtp_unroll": 5, index: True}
    back = Namespace(mtp_num_layers=1)
    set_passes(back, HFConfig.from_keys({"model_type": "glm4_moe", **keys}))
    assert vars(back) == vars(trained)
    assert pass_keys(Namespace(mtp_num_layers=3, mtp_use_repeated_layer=True)) == {"mtp_unroll": 3}  # one on disk
    assert pass_keys(Namespace(mtp_num_layers=2, mtp_use_repeated_layer=False)) == {}
