"""A model of any size with random weights whose MTP layers match its trunk as often as requested.

The speed of a forward pass does not depend on the weights, but the speed of drafting depends on acceptance. Here every
transformer layer computes in full and adds nothing: its output projections are 0. So the trunk maps each token to the
next one of a single cycle through the vocabulary. An MTP layer's eh_proj passes the embedding on, so the layer does the
same for its own token. Noise on the embedding part of eh_proj causes errors; benchmarks measure how often.

Products with zeros draw less power than others. If that matters, the output projections are random too, as small as
Megatron initializes them, so that the layers change few of the tokens that the embedding determines.
"""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtp.model.arguments import MTPGPTModelConfig
from megatron_mtp.model.build import build
from megatron_mtp.spec.config import MTPConfig

SMOLLM2: dict[str, Any] = {
    "layers": 30, "hidden": 576, "vocabulary": 49152, "heads": 9, "groups": 3, "ffn": 1536, "tied": True
}  # fmt: skip
"""The shape of SmolLM2-135M."""
POSITIONS = 512


def agreeing_model(
    layers: int,
    hidden: int,
    vocabulary: int,
    depths: int,
    noise: float,
    heads: int | None = None,
    groups: int | None = None,
    ffn: int | None = None,
    tied: bool = False,
    zeros: bool = True,
) -> GPTModel:
    """Build a float32 model on the current device; `noise` is relative to the identity in eh_proj, 0 for full
    agreement.

    Heads have 64 channels by default, each with its own key. A tied head maps each token to itself. Without `zeros`,
    output projections are random, so layers add something.
    """
    heads = heads or hidden // 64
    transformer = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn or hidden * 11 // 4,
        num_attention_heads=heads,
        num_query_groups=groups or heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        mtp_num_layers=depths,
    )
    config = MTPGPTModelConfig(
        transformer=transformer,
        mtp=MTPConfig(),
        vocab_size=vocabulary,
        seq_length=POSITIONS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )
    model = build(config)
    _set_weights(model, noise, zeros)
    return model.cuda().eval()


def bytes_of_a_step(model: GPTModel) -> int:
    """Return bytes of weights that a plain step reads: layers, last norm and head.

    Of the embedding, only the rows of the step's tokens count.
    """
    tied = model.share_embeddings_and_output_weights
    head = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    return sum(weight.nbytes for weight in (*model.decoder.parameters(), head))


@torch.no_grad()
def _set_weights(model: GPTModel, noise: float, zeros: bool, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    embedding = model.embedding.word_embeddings.weight
    vocabulary, hidden = embedding.shape
    embedding.copy_(torch.randn(vocabulary, hidden, generator=generator))
    if not model.share_embeddings_and_output_weights:
        cycle = torch.randperm(vocabulary, generator=generator)
        model.output_layer.weight[cycle.roll(-1)] = embedding[cycle] / hidden**0.5
    layers: list[Any] = [*model.decoder.layers, *(depth.tf_layer for depth in model.mtp.layers)] if zeros else []
    for layer in layers:
        layer.self_attention.linear_proj.weight.zero_()
        layer.mlp.linear_fc2.weight.zero_()
    for depth in list[Any](model.mtp.layers):
        error = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
        depth.eh_proj.weight.zero_()
        depth.eh_proj.weight[:, :hidden] = torch.eye(hidden) + noise * error
