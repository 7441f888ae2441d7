"""model/recurrent.py: against recurrences computed position by position, and against transformers.

Tensor and context parallelism need several processes: tests/functional/test_layouts.py.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hybrid_single import RECURRENT
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_single import randomize, relative_difference, transformer_config
from torch import Tensor
from torch.nn.functional import conv1d, pad
from transformers import NemotronHConfig, Qwen3NextConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.recurrent import (
    PortableGatedDeltaNet,
    PortableMamba,
    causal_convolution,
    columns_of_ranks,
    documents_of,
    gated_delta_rule,
    of_length_one,
    scan,
)

pytestmark = pytest.mark.usefixtures("megatron")

ROWS, HEADS, GROUPS, CHANNELS, STATE, CHUNK = 2, 4, 2, 3, 5, 4
TOLERANCE = 1e-5
"""For float32: the largest difference in a tensor relative to its largest value."""

LENGTHS = {"one chunk": 3, "whole chunks": 8, "a part of a chunk": 11}
DOCUMENTS = {
    "one document": [[0] * 11],
    "by row": [[0] * 11, [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]],
    "tiny": [[*range(11)]],
}


def documents(kind: str, length: int) -> Tensor:
    return torch.tensor(DOCUMENTS[kind])[:, :length].cuda()


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cuda()


def assert_same(ours: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Check values to 1e-9 and gradients to 1e-8."""
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    upstream = draw(*ours.shape, seed=7)
    gradients = (torch.autograd.grad((each * upstream).sum(), inputs) for each in (ours, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def starts(document_BL: Tensor, row: int, position: int) -> bool:
    """Return whether a document starts here, so that the previous state is 0."""
    own = document_BL[row % document_BL.size(0)]
    return position == 0 or bool(own[position] != own[position - 1])


def scan_by_position(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, document_BL: Tensor) -> Tensor:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T; y_t = h_t C_t."""
    rows, length, heads, _ = x.shape
    outputs = []
    for row in range(rows):
        for head in range(heads):
            group, state = head // (heads // B.size(2)), torch.zeros(CHANNELS, STATE).to(x)
            for at in range(length):
                kept = torch.zeros_like(state) if starts(document_BL, row, at) else state
                added = dt[row, at, head] * torch.outer(x[row, at, head], B[row, at, group])
                state = (dt[row, at, head] * A[head]).exp() * kept + added
                outputs.append(state @ C[row, at, group])
    return torch.stack(outputs).view(rows, heads, length, -1).transpose(1, 2)


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
def test_the_scan_is_the_recurrence(length: int, kind: str) -> None:
    x = draw(ROWS, length, HEADS, CHANNELS, seed=1).requires_grad_()
    dt = draw(ROWS, length, HEADS, seed=2).exp().requires_grad_()
    A = (-draw(HEADS, seed=3).exp()).requires_grad_()
    B, C = (draw(ROWS, length, GROUPS, STATE, seed=seed).requires_grad_() for seed in (4, 5))
    document_BL = documents(kind, length)
    inputs = [x, dt, A, B, C]
    assert_same(scan(*inputs, document_BL, chunk=CHUNK), scan_by_position(*inputs, document_BL), inputs)


def delta_by_position(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document_BL: Tensor) -> Tensor:
    """S = exp(g_t) S; S += beta_t k_t (v_t - S^T k_t)^T; o_t = S^T q_t / sqrt(K)."""
    rows, length, heads, _ = q.shape
    outputs = []
    for row in range(rows):
        for head in range(heads):
            state = torch.zeros(STATE, CHANNELS).to(q)
            for at in range(length):
                kept = torch.zeros_like(state) if starts(document_BL, row, at) else state
                kept = g[row, at, head].exp() * kept
                wrong = v[row, at, head] - kept.T @ k[row, at, head]
                state = kept + beta[row, at, head] * torch.outer(k[row, at, head], wrong)
                outputs.append(state.T @ q[row, at, head] / STATE**0.5)
    return torch.stack(outputs).view(rows, heads, length, -1).transpose(1, 2)


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
def test_the_delta_rule_is_the_recurrence(length: int, kind: str) -> None:
    q, k = (of_length_one(draw(ROWS, length, HEADS, STATE, seed=seed)).requires_grad_() for seed in (1, 2))
    v = draw(ROWS, length, HEADS, CHANNELS, seed=3).requires_grad_()
    g = (-draw(ROWS, length, HEADS, seed=4).exp()).requires_grad_()
    beta = draw(ROWS, length, HEADS, seed=5).sigmoid().requires_grad_()
    document_BL, inputs = documents(kind, length), [q, k, v, g, beta]
    assert_same(gated_delta_rule(*inputs, document_BL, chunk=CHUNK), delta_by_position(*inputs, document_BL), inputs)


@pytest.mark.parametrize("rule", ["scan", "delta rule"])
def test_strong_decays_over_long_chunks_have_finite_gradients(rule: str) -> None:
    """A decay is the exponential of a difference of two sums; with the opposite sign it overflows float32."""
    dt = torch.full((1, 64, 1), 50.0).cuda().requires_grad_()
    values, document_1L = torch.ones(1, 64, 1, 2).cuda(), documents("one document", 1).expand(1, 64)
    if rule == "scan":
        output = scan(values, dt, torch.tensor([-2.0]).cuda(), values, values, document_1L)
    else:
        output = gated_delta_rule(values, values, values, -2 * dt, dt.sigmoid(), document_1L)
    output.sum().backward()
    assert dt.grad is not None
    assert dt.grad.isfinite().all()


@pytest.mark.parametrize("length", [2, 9])
def test_the_convolution_of_one_document_matches_torch(length: int) -> None:
    x, weight, bias = (draw(*shape, seed=1).requires_grad_() for shape in ((ROWS, length, 6), (6, 4), (6,)))
    expected = conv1d(pad(x.transpose(1, 2), (3, 0)), weight.unsqueeze(1), bias, groups=6).transpose(1, 2)
    assert_same(causal_convolution(x, weight, bias, documents_of(None, x)), expected, [x, weight, bias])


def test_the_convolution_sees_nothing_of_the_document_before() -> None:
    x, weight = draw(1, 7, 6, seed=1), draw(6, 4, seed=2)
    bounds = torch.tensor([0, 1, 3, 7])
    whole = causal_convolution(x, weight, None, documents_of(bounds, x))
    parts = [x[:, start:end] for start, end in pairwise(bounds.tolist())]
    assert torch.equal(whole, torch.cat([causal_convolution(p, weight, None, documents_of(None, p)) for p in parts], 1))


def test_ranks_that_share_a_group_are_neighbors() -> None:
    """Heads are split over four ranks, and two groups of two columns over pairs of them."""
    heads, groups = columns_of_ranks([4, 4], 4, (1, 2))
    assert heads.tolist() == [[0], [1], [2], [3]]
    assert groups.tolist() == [[4, 5], [4, 5], [6, 7], [6, 7]]


# --- Megatron's modules ----------------------------------------------------------------------------------------------


def mamba() -> PortableMamba:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parts = MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    made = PortableMamba(transformer_config(None, **RECURRENT), parts, d_model=32, layer_number=1, pg_collection=groups)
    randomize(made)
    return made.cuda()


def delta_net() -> PortableGatedDeltaNet:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, PortableNorm, RowParallelLinear)
    made = PortableGatedDeltaNet(transformer_config(None, **RECURRENT), parts, layer_number=1, pg_collection=groups)
    randomize(made)
    return made.cuda()


def run(layer: torch.nn.Module, hidden_SBH: Tensor, packed: PackedSeqParams | None = None) -> Tensor:
    arguments = (hidden_SBH,) if isinstance(layer, PortableMamba) else (hidden_SBH, None)
    output, bias = layer(*arguments, packed_seq_params=packed)
    assert bias is None
    return output


MODULES: dict[str, Callable[[], torch.nn.Module]] = {"mamba": mamba, "delta": delta_net}


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_a_packed_row_matches_its_separate_documents(make: Callable[[], torch.nn.Module], padded: bool) -> None:
    """Padding belongs to the preceding document."""
    layer, hidden_SBH = make(), draw(150, 1, 32, seed=3).float()
    held = torch.tensor([0, 4, 5, 80, 150], dtype=torch.int32).cuda()
    offsets = torch.tensor([0, 3, 4, 70, 130], dtype=torch.int32).cuda() if padded else held
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_q_padded=held if padded else None)
    alone = [run(layer, hidden_SBH[start:end]) for start, end in pairwise(held.tolist())]
    assert relative_difference(run(layer, hidden_SBH, packed), torch.cat(alone)) <= TOLERANCE


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_an_inference_cache_is_rejected_with_a_clear_error(make: Callable[[], torch.nn.Module]) -> None:
    layer, arguments = make(), {"hidden_states": draw(4, 1, 32, seed=3).float(), "inference_context": object()}
    with pytest.raises(ValueError, match="decode with a cache; train and evaluate with"):
        layer(**arguments) if isinstance(layer, PortableMamba) else layer(**arguments, attention_mask=None)


def test_mamba_matches_transformers() -> None:
    """NemotronH has a lower limit for dt, which Megatron's own layer has not: it is 0 here."""
    config = NemotronHConfig(
        vocab_size=32, hidden_size=32, mamba_num_heads=8, mamba_head_dim=4, n_groups=2, ssm_state_size=6, conv_kernel=4,
        chunk_size=16, time_step_min=0.0, layer_norm_epsilon=1e-5, layers_block_type=["mamba"],
    )  # fmt: skip
    theirs, ours = NemotronHMamba2Mixer(config, 0), mamba()
    own = {name.replace("conv1d_", "conv1d."): value for name, value in ours.named_parameters()}
    theirs.load_state_dict(own)
    hidden_BSH = draw(2, 40, 32, seed=5).float()
    expected_BSH = theirs.cuda().eval()(hidden_BSH)
    assert relative_difference(run(ours, hidden_BSH.transpose(0, 1)).transpose(0, 1), expected_BSH) <= TOLERANCE


def test_gated_delta_net_matches_transformers() -> None:
    """Qwen3-Next stores its projections by key head, Megatron one after another."""
    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=4, linear_conv_kernel_dim=4, layer_types=["linear_attention"],
        rms_norm_eps=transformer_config(None).layernorm_epsilon,
    )  # fmt: skip
    theirs, ours = Qwen3NextGatedDeltaNet(config, 0), delta_net()
    own = dict(ours.named_parameters())
    query, key, value, gate, beta, alpha = (
        part.view(2, -1, 32) for part in own.pop("in_proj.weight").split([12, 12, 16, 16, 4, 4])
    )
    own["in_proj_qkvz.weight"] = torch.cat([query, key, value, gate], dim=1).flatten(0, 1)
    own["in_proj_ba.weight"] = torch.cat([beta, alpha], dim=1).flatten(0, 1)
    own["norm.weight"] = own.pop("out_norm.weight")
    theirs.load_state_dict(own)
    hidden_BSH = draw(2, 70, 32, seed=5).float()
    expected_BSH = theirs.cuda().eval()(hidden_BSH)
    assert relative_difference(run(ours, hidden_BSH.transpose(0, 1)).transpose(0, 1), expected_BSH) <= TOLERANCE
