"""Convert a dense model to transformers' Llama with its MTP modules: the same weights, to compare speed."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import MtpModel


def llama_of(model: GPTModel, dtype: torch.dtype) -> tuple[LlamaForCausalLM, MtpModel]:
    """Return the trunk, and the MTP layers in the form that transformers' assisted generation takes."""
    ours, tied = model.config, model.share_embeddings_and_output_weights
    embedding = model.embedding.word_embeddings.weight
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.ffn_hidden_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_attention_heads,
        num_key_value_heads=ours.num_query_groups,
        head_dim=ours.kv_channels,
        rms_norm_eps=ours.layernorm_epsilon,
        max_position_embeddings=model.max_sequence_length,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.num_mtp_layers = ours.mtp_num_layers
    trunk = LlamaForCausalLM(config).eval()
    state = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": model.decoder.final_layernorm.weight,
        "lm_head.weight": embedding if tied else model.output_layer.weight,
    }
    for number, layer in enumerate(model.decoder.layers):
        state |= {f"model.layers.{number}.{name}": weight for name, weight in _layer(layer).items()}
    trunk.load_state_dict(state)
    depths = MtpModel(trunk, config.num_mtp_layers).eval()
    with torch.no_grad():
        for theirs, layer in zip(depths.layers, list[Any](model.mtp.layers), strict=True):
            theirs.mtp_block.load_state_dict(_layer(layer.tf_layer))
            theirs.eh_proj.weight.copy_(layer.eh_proj.weight)
            pairs = (
                (theirs.enorm, layer.enorm),
                (theirs.hnorm, layer.hnorm),
                (theirs.post_norm, layer.final_layernorm),
            )
            for norm, own in pairs:
                norm.weight.copy_(own.weight)
    trunk, depths = trunk.to(dtype), depths.to(dtype)
    depths.tie_with_main_model(trunk)
    return trunk, depths


def _layer(layer: Any) -> dict[str, Tensor]:
    attention, mlp = layer.self_attention, layer.mlp
    groups, channels = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    heads = attention.num_attention_heads_per_partition // groups
    mixed = attention.linear_qkv.weight.view(groups, heads + 2, channels, -1)
    gate, up = mlp.linear_fc1.weight.chunk(2)
    return {
        "input_layernorm.weight": layer.input_layernorm.weight,
        "post_attention_layernorm.weight": layer.pre_mlp_layernorm.weight,
        "self_attn.q_proj.weight": mixed[:, :heads].flatten(0, 2),
        "self_attn.k_proj.weight": mixed[:, heads].flatten(0, 1),
        "self_attn.v_proj.weight": mixed[:, heads + 1].flatten(0, 1),
        "self_attn.o_proj.weight": attention.linear_proj.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": mlp.linear_fc2.weight,
    }


@torch.inference_mode()
def greedy(trunk: LlamaForCausalLM, depths: MtpModel | None, prompt: list[int], new_tokens: int) -> list[int]:
    """Run transformers' own generation, with its MTP if `depths` are given (loading them is not timed)."""
    original = MtpModel.from_pretrained
    MtpModel.from_pretrained = classmethod(lambda cls, *_, **__: depths)
    try:
        prompt_BT = torch.tensor([prompt], device=trunk.device)
        ids = trunk.generate(
            prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_mtp=True if depths is not None else None,
            pad_token_id=0,
        )
    finally:
        MtpModel.from_pretrained = original
    return ids[0, len(prompt) :].tolist()
