"""The hook that Megatron's `DynamicInferenceEngine` calls to draft, on our MTP layers.

The controller's `_compute_serial_mtp_and_sample` and Megatron's `compute_mtp_single_step` run here on a stand-in for
the engine's state, since the engine itself needs a GPU. Values are compared with a plain transformer layer.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hybrid_single import our_hybrid
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import LATENT, MOE, our_model
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from megatron_mtp.model.attachment import attached_of

WIDTH = 32
EPSILON = 1e-5


def requests(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return states [N, 1, H], tokens [1, N] and positions [1, N] of so many requests."""
    generator = torch.Generator().manual_seed(3)
    states_NBH = torch.randn(count, 1, WIDTH, generator=generator)
    return states_NBH, torch.arange(5, 5 + count).unsqueeze(0), torch.arange(7, 7 + count).unsqueeze(0)


def plain_depth(layer: Any, state_H: Tensor, embedded_H: Tensor) -> Tensor:
    """Compute a single position with plain products: attention over one key returns its value."""

    def norm(module: Any, hidden_H: Tensor) -> Tensor:
        return rms_norm(hidden_H, (WIDTH,), module.weight, EPSILON)

    both_2H = torch.cat([norm(layer.enorm, embedded_H), norm(layer.hnorm, state_H)])
    hidden_H, inner = linear(both_2H, layer.eh_proj.weight), layer.tf_layer
    groups, channels = 2, WIDTH // 4  # rows of linear_qkv, per group: two heads of queries, one of keys, one of values
    projected = linear(norm(inner.input_layernorm, hidden_H), inner.self_attention.linear_qkv.weight)
    value_GC = projected.view(groups, 4, channels)[:, 3]
    attended_H = value_GC.repeat_interleave(2, dim=0).flatten()
    hidden_H = hidden_H + linear(attended_H, inner.self_attention.linear_proj.weight)
    gate, up = linear(norm(inner.pre_mlp_layernorm, hidden_H), inner.mlp.linear_fc1.weight).chunk(2)
    hidden_H = hidden_H + linear(silu(gate) * up, inner.mlp.linear_fc2.weight)
    return norm(layer.final_layernorm, hidden_H)


@torch.no_grad()
def test_a_depth_drafts_for_every_request_by_itself() -> None:
    model = our_model(2).eval()
    states_NBH, tokens_BN, positions_BN = requests(3)
    for layer in model.mtp.layers:
        made_NBH = layer.forward_single_position(states_NBH, tokens_BN, positions_BN, model.embedding)
        assert made_NBH.shape == states_NBH.shape
        words_VH = model.embedding.word_embeddings.weight
        for request in range(3):
            plain_H = plain_depth(layer, states_NBH[request, 0], words_VH[tokens_BN[0, request]])
            torch.testing.assert_close(made_NBH[request, 0], plain_H, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, MOE, LATENT], ids=["dense", "experts", "latent"])
@torch.no_grad()
def test_other_sequences_of_a_batch_do_not_change_the_result(changes: dict[str, Any]) -> None:
    model = our_model(1, **changes).eval()
    states_NBH, tokens_BN, positions_BN = requests(4)
    together = model.mtp.layers[0].forward_single_position(states_NBH, tokens_BN, positions_BN, model.embedding)
    for request in range(4):
        own = slice(request, request + 1)
        alone = model.mtp.layers[0].forward_single_position(
            states_NBH[own], tokens_BN[:, own], positions_BN[:, own], model.embedding
        )
        torch.testing.assert_close(together[own], alone, rtol=1e-5, atol=1e-6)


def controller(model: GPTModel, states_SBH: Tensor, tokens: list[int], last: list[int], count: int) -> Any:
    """Return what the controller reads and writes when it drafts `count` tokens for requests whose last rows are
    `last`.
    """
    context = SimpleNamespace(
        total_request_count=len(last),
        paused_request_count=0,
        mtp_decoder_hidden_states=states_SBH,
        using_cuda_graph_this_step=lambda: False,
        _nvls_dispatcher=False,
        inference_cuda_graph_scope=None,
    )
    return SimpleNamespace(
        inference_wrapped_model=SimpleNamespace(inference_context=context),
        _unwrapped_model=model,
        _is_last_pp_stage=True,
        _sp_enabled=False,
        _mtp_resolved_padded_count=None,
        _last_accepted_seq_indices=torch.tensor(last),
        _sampled_tokens_cuda=torch.tensor(tokens),
        _mtp_token_ids_buf=torch.zeros(1, 8, dtype=torch.long),
        _mtp_position_ids_buf=torch.zeros(1, 8, dtype=torch.long),
        _sampled_mtp_tokens_cuda=torch.zeros(count, 8, dtype=torch.long),
        num_mtp_depths=count,
        model_is_pipeline_parallel=False,
        _sample_from_logits_2d=lambda logits_NV: logits_NV.argmax(-1),
    )


@pytest.mark.parametrize("repeated", [False, True])
@torch.no_grad()
def test_megatrons_controller_drafts_from_the_previous_state_and_draft(repeated: bool) -> None:
    """Megatron's own code: base token and state in, drafts out, compared with isolated plain layers."""
    model = our_model(2, mtp_use_repeated_layer=repeated).eval()
    states_SBH, tokens, last = torch.randn(9, 1, WIDTH), [2, 4], [5, 2]
    state = controller(model, states_SBH, tokens, last, count=2)
    TextGenerationController._compute_serial_mtp_and_sample(state, torch.tensor([6, 3]))
    drafted_KN = state._sampled_mtp_tokens_cuda[:, :2]
    assert state.inference_wrapped_model.inference_context.mtp_decoder_hidden_states is None
    for request, token in enumerate(tokens):
        state_H = states_SBH[last[request], 0]
        for number in range(2):
            layer = model.mtp.layers[0 if repeated else number]
            state_H = plain_depth(layer, state_H, model.embedding.word_embeddings.weight[token])
            token = int(attached_of(model).head().project(state_H[None, None])[0, 0].argmax())
            assert token == drafted_KN[number, request]


@torch.no_grad()
def test_the_trunk_keeps_its_states_for_the_controller() -> None:
    """And it returns only the logits of the last tokens, as Megatron's GPT does."""
    model = our_model(2).eval()
    context = SimpleNamespace(
        is_dynamic_batching=lambda: True,
        is_static_batching=lambda: False,
        num_speculative_tokens=2,
        mtp_decoder_hidden_states=None,
        config=SimpleNamespace(materialize_only_last_token_logits=True),
        last_token_logits=lambda states_BSH: states_BSH[0, [2, 5]],
    )
    states_SBH = torch.randn(6, 1, WIDTH)
    named = dict.fromkeys(["input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"])
    with InferenceMode.active():
        logits_BSV = model._postprocess(
            states_SBH, **named, mtp_in_postprocess=True, runtime_gather_output=True, inference_context=context
        )
    assert context.mtp_decoder_hidden_states is states_SBH
    assert logits_BSV.shape == (1, 2, model.vocab_size)
    expected_SBV = attached_of(model).head().project(states_SBH[[2, 5]])
    torch.testing.assert_close(logits_BSV[0], expected_SBV[:, 0])


@pytest.mark.parametrize("pattern", [None, "*-/*-/*-"], ids=["gpt", "hybrid"])
@torch.no_grad()
def test_the_trunk_computes_the_same_for_the_engine(pattern: str | None) -> None:
    model = (our_model(2) if pattern is None else our_hybrid(pattern)).eval()
    tokens_BS, positions_BS = torch.arange(3, 11)[None], torch.arange(8)[None]
    elsewhere_BSV = model(tokens_BS, positions_BS, None)
    with InferenceMode.active():
        logits_BSV = model(tokens_BS, positions_BS, None, runtime_gather_output=True)
    torch.testing.assert_close(logits_BSV, elsewhere_BSV)


def test_settings_that_the_engine_cannot_draft_with_are_rejected() -> None:
    states_NBH, tokens_BN, positions_BN = requests(2)
    parallel = our_model(1, architecture="parallel").eval()
    with pytest.raises(ValueError, match="parallel heads"):
        parallel.mtp.layers[0].forward_single_position(states_NBH, tokens_BN, positions_BN, parallel.embedding)
    model = our_model(1).eval()
    layer = model.mtp.layers[0]
    layer.tf_layer.layer_type_list = ["M", "-"]
    with pytest.raises(ValueError, match="no states of the MTP layers"):
        layer.forward_single_position(states_NBH, tokens_BN, positions_BN, model.embedding)
    layer.tf_layer.layer_type_list = []
    layer.config.sequence_parallel = True
    with pytest.raises(ValueError, match="--sequence-parallel"):
        layer.forward_single_position(states_NBH, tokens_BN, positions_BN, model.embedding)
