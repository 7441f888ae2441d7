"""model/attention.py: attention against a plain loop over documents, heads and slots, values and gradients.

Context parallelism needs several processes: tests/functional/test_layouts.py.
"""

from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron_single import transformer_config
from torch import Tensor

from megatron_mtp.model.attention import PortableAttention, SinkAttention

pytestmark = pytest.mark.usefixtures("megatron")

LENGTH, ROWS, HEADS, GROUPS, CHANNELS = 12, 2, 4, 2, 8


def attention(causal: bool = True, **changes: Any) -> PortableAttention:
    mask_type = AttnMaskType.causal if causal else AttnMaskType.no_mask
    return PortableAttention(transformer_config(1, **changes), 1, mask_type, "self")


def tensors(*shape: int, value_channels: int = CHANNELS, keys: int | None = None) -> list[Tensor]:
    """Return query, key and value with these leading dimensions; `keys` sets a different first dimension for the latter
    two.
    """
    generator = torch.Generator().manual_seed(3)
    others = shape if keys is None else (keys, *shape[1:])
    shapes = [(*shape, HEADS, CHANNELS), (*others, GROUPS, CHANNELS), (*others, GROUPS, value_channels)]
    return [torch.randn(one, generator=generator, dtype=torch.float64).cuda().requires_grad_() for one in shapes]


def plain(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Return softmax(Q K^T / sqrt(C)) V [B, S, N * C] by a loop over batch and heads; `visible` is [B, S, keys]."""
    rows = []
    for row in range(query.size(1)):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = query[:, row, head] @ key[:, row, group].T / CHANNELS**0.5
            scores = scores.masked_fill(~visible[row], float("-inf"))
            heads.append(scores.softmax(-1) @ value[:, row, group])
        rows.append(torch.cat(heads, -1))
    return torch.stack(rows, 1)


def assert_same(ours: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4), dtype=ours.dtype).cuda()
    for one, other in zip(
        torch.autograd.grad((ours * upstream).sum(), inputs),
        torch.autograd.grad((expected * upstream).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def causal(queries: int, keys: int) -> Tensor:
    """Return a mask [B, queries, keys]; the queries are the last of the keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries).expand(ROWS, -1, -1)


@pytest.mark.parametrize("value_channels", [CHANNELS, 5], ids=["equal", "fewer value channels"])
def test_causal_attention_matches_a_plain_implementation(value_channels: int) -> None:
    inputs = tensors(LENGTH, ROWS, value_channels=value_channels)
    assert_same(attention()(*inputs, None), plain(*inputs, causal(LENGTH, LENGTH)), inputs)


def test_queries_may_be_the_last_of_a_longer_row_of_keys() -> None:
    inputs = tensors(3, ROWS, keys=LENGTH)
    assert_same(attention()(*inputs, None), plain(*inputs, causal(3, LENGTH)), inputs)


def test_a_layer_that_is_not_causal() -> None:
    inputs = tensors(LENGTH, ROWS)
    everything = torch.ones_like(causal(LENGTH, LENGTH))
    assert_same(attention(causal=False)(*inputs, None), plain(*inputs, everything), inputs)


def test_a_mask_of_its_own_for_every_row() -> None:
    inputs = tensors(LENGTH, ROWS)
    visible = causal(LENGTH, LENGTH).clone()
    visible[0, 5:, :5] = visible[1, 9:, :9] = False  # two documents each, as with --reset-attention-mask
    assert_same(attention()(*inputs, ~visible.unsqueeze(1)), plain(*inputs, visible), inputs)


@pytest.mark.parametrize("window", [(3, 0), (-1, 0), (2, 1)])
def test_a_sliding_window_limits_the_visible_positions(window: tuple[int, int]) -> None:
    inputs = tensors(LENGTH, ROWS)
    slot = torch.arange(LENGTH, device="cuda")
    ahead = slot[None, :] - slot[:, None]
    visible = (ahead <= 0) & ((ahead >= -window[0]) | (window[0] < 0))
    assert_same(attention(window_size=window)(*inputs, None), plain(*inputs, visible.expand(ROWS, -1, -1)), inputs)


@pytest.mark.parametrize(
    ("lengths", "padded"),
    [([5, 1, 6], None), ([12], None), ([3, 1, 4], [4, 2, 6]), ([1] * 12, None)],
    ids=["documents", "one document", "padded", "documents of one token"],
)
def test_packed_documents_do_not_see_each_other(lengths: list[int], padded: list[int] | None) -> None:
    cu_seqlens, cu_seqlens_padded = (
        None if sizes is None else torch.tensor([0, *sizes]).cumsum(0).int().cuda() for sizes in (lengths, padded)
    )
    packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, cu_seqlens_padded, cu_seqlens_padded)
    inputs = tensors(LENGTH)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(padded or lengths)).cuda()
    visible = causal(LENGTH, LENGTH)[:1] & (document[:, None] == document[None, :])
    expected = plain(*(tensor.unsqueeze(1) for tensor in inputs), visible).squeeze(1)
    assert_same(attention()(*inputs, None, packed_seq_params=packed), expected, inputs)


def test_float32_is_that_of_megatrons_own() -> None:
    inputs = [tensor.detach().float().requires_grad_() for tensor in tensors(LENGTH, ROWS)]
    theirs = DotProductAttention(transformer_config(1), 1, AttnMaskType.causal, "self")
    torch.testing.assert_close(attention()(*inputs, None), theirs(*inputs, None), rtol=1e-5, atol=1e-6)


def test_dropout_is_only_in_training_with_its_own_generator() -> None:
    core, inputs = attention(attention_dropout=0.5), tensors(LENGTH, ROWS)
    outside = torch.cuda.get_rng_state()
    dropped = core(*inputs, None)
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    assert not torch.allclose(dropped, core.eval()(*inputs, None))
    assert torch.equal(core(*inputs, None), attention()(*inputs, None))


def test_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="leave attention_bias out"):
        attention()(*tensors(LENGTH, ROWS), None, attention_bias=torch.zeros(1))


def with_a_sink(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, offset_N: Tensor) -> Tensor:
    """Like `plain`, with a softmax over each head's scores and its sink."""
    rows = []
    for row in range(query.size(1)):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = query[:, row, head] @ key[:, row, group].T / CHANNELS**0.5
            scores = scores.masked_fill(~visible[row], float("-inf"))
            both = torch.cat([scores, offset_N[head].expand(len(scores), 1)], dim=-1)
            heads.append(both.softmax(-1)[:, :-1] @ value[:, row, group])
        rows.append(torch.cat(heads, -1))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("changes", [{}, {"window_size": (3, 0)}])
@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
def test_a_sink_is_part_of_every_softmax(kind: str, changes: dict[str, Any]) -> None:
    config = transformer_config(1, softmax_type=kind, **changes)
    ours = SinkAttention(config, 1, AttnMaskType.causal, "self").double()
    inputs = tensors(LENGTH, ROWS)
    offset_N = torch.zeros(HEADS, dtype=torch.float64).cuda()
    if kind == "learnable":
        ours.softmax_offset = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64).cuda())
        offset_N = ours.softmax_offset
        inputs = [*inputs, offset_N]
    visible = torch.ones(LENGTH, LENGTH).tril().bool()
    if changes:
        visible &= torch.ones(LENGTH, LENGTH).triu(-3).bool()
    expected = with_a_sink(*inputs[:3], visible.expand(ROWS, -1, -1).cuda(), offset_N)
    assert_same(ours(*inputs[:3], None), expected, inputs)


def test_a_trained_sink_is_stored_as_megatrons_is() -> None:
    config = transformer_config(1, softmax_type="learnable")
    ours, theirs = (kind(config, 1, AttnMaskType.causal, "self") for kind in (SinkAttention, DotProductAttention))
    stored = [one.sharded_state_dict("core.", (), {"dp_cp_group": None}) for one in (ours, theirs)]
    assert [{key: (value.key, value.global_shape) for key, value in one.items()} for one in stored] == [
        {"core.softmax_offset": ("core.softmax_offset", (HEADS,))}
    ] * 2
