"""Models of Transformer Engine's own modules, built, saved and loaded on a CPU, which cannot run their kernels."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.training.arguments import validate_args
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from megatron_mtp.megatron import parsing
from megatron_mtp.megatron.checkpoint.iterations import iteration_folder
from megatron_mtp.model.arguments import config_of
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.build import build, join_world
from megatron_mtp.model.chain import DepthInputs
from megatron_mtp.model.latent_attention import PLAIN_QUERIES
from megatron_mtp.model.trunk_output import AttentionInputs

COMMON = """
    --num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16 --seq-length 64
    --max-position-embeddings 64 --vocab-size 256 --mtp-num-layers 1 --micro-batch-size 1 --train-iters 1 --lr 1e-4
    --attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --no-rope-fusion
"""
GQA = "--group-query-attention --num-query-groups 2"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
SHARED = """
    --moe-layer-freq ([0]*1+[1]*2) --moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
"""
MLA = """
    --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm
"""
KINDS = {
    "gqa": GQA,
    "gqa-norms": f"{GQA} --qk-layernorm",
    "gqa-bias": f"{GQA} --add-qkv-bias",
    "moe": f"{GQA} --qk-layernorm {MOE}",
    "moe-shared": f"{GQA} --qk-layernorm {MOE} {SHARED}",
    "mla-moe": f"{MLA} --q-lora-rank 24 {MOE} {SHARED}",
    "mla-dense": f"{MLA} --q-lora-rank 24",
    "mla-fused": f"{MLA} --q-lora-rank 24 --mla-down-proj-fusion",
    "mla-moe-plain-queries": f"{MLA} {MOE} {SHARED}",
}
FIRST_PASS = {
    "gqa-first-pass": f"{GQA} --mtp-use-repeated-layer",
    "mla-first-pass": f"{MLA} --q-lora-rank 24 --mtp-use-repeated-layer",
}
"""Repeated layers whose later passes attend to the keys of pass 1."""
OF_MEGATRON = "query-norms"
"""A checkpoint with queries as in Megatron's module: after a norm, which DeepSeek-V2-Lite does not have."""

FUSED_STATE = re.compile(r"linear_(q|kv|qkv)_down_proj\._extra_state$")
"""FP8 states that Megatron's fused down-projection saves under two names and does not find when loading."""

WEIGHTS, STATES = "weights.safetensors", "states.safetensors"


def made(kind: str) -> tuple[Namespace, LanguageModule]:
    """Build a model as training does, with random weights, including norms."""
    flags = f"{COMMON} {(KINDS | FIRST_PASS)[kind]} --transformer-impl transformer_engine"
    args = parsing.parsed(flags.split(), 256)
    args.padded_vocab_size, args.tokenizer_type = 256, "NullTokenizer"
    args.distributed_backend, args.num_workers, args.use_cpu_initialization = "gloo", 0, True
    validate_args(args)
    if kind in FIRST_PASS:
        args.mtp_unroll, args.mtp_repeated_layer_first_pass_kv = 3, True
    model = build(config_of(args))
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data = 1 + torch.randn_like(weight) / 4
    return args, model


def weights(model: LanguageModule) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: value.float().contiguous() for name, value in state.items() if "_extra_state" not in name}


def save(folder: str) -> None:
    """Save a checkpoint of every kind with Megatron, and next to it the weights by name."""
    join_world(alone=True)
    for kind in KINDS:
        write(Path(folder, kind), *made(kind))
    with mock.patch.dict(PLAIN_QUERIES, clear=True):
        write(Path(folder, OF_MEGATRON), *made("mla-moe-plain-queries"))


def write(folder: Path, args: Namespace, model: LanguageModule) -> None:
    step = folder / "iter_0000001"
    step.mkdir(parents=True)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": model.sharded_state_dict()}
    dist_checkpointing.save(state, str(step))
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    save_file(weights(model), folder / WEIGHTS)


def load(folder: str) -> None:
    """Load the conversions converted/KIND with Megatron's default strictness, and compare every weight."""
    join_world(alone=True)
    for converted in Path(folder, "converted").iterdir():
        kind = converted.name
        _, model = made(kind)
        for weight in model.parameters():
            weight.data.zero_()
        step = iteration_folder(converted)
        metadata = dist_checkpointing.load_content_metadata(str(step)) or {}
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        loaded = dist_checkpointing.load(state, str(step), strict=StrictHandling("assume_ok_unexpected"))
        apart = model.load_state_dict(loaded["model"], strict=False)  # Megatron does this too if a strict load fails
        assert all(FUSED_STATE.search(name) for name in (*apart.missing_keys, *apart.unexpected_keys)), apart
        given, found = load_file(Path(folder, kind, WEIGHTS)), weights(model)
        assert given.keys() == found.keys()
        assert not [name for name, value in given.items() if not torch.equal(value, found[name])], kind


def first_pass(folder: str) -> None:
    """Save checkpoints of `FIRST_PASS`, and the output of their passes with plain products instead of kernels."""
    join_world(alone=True)
    with_plain_products()
    for kind in FIRST_PASS:
        args, model = made(kind)
        write(Path(folder, kind), args, model)
        save_file(passes(model), Path(folder, kind, STATES))


def with_plain_products() -> None:
    """For the rest of the process, compute with torch what the kernels compute in float32."""
    import transformer_engine.pytorch as te

    def normed(module: Any, hidden: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        return rms_norm(hidden, weight.shape, weight, module.eps)

    def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        made = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return made.permute(2, 0, 1, 3).flatten(2)

    te.RMSNorm.forward = lambda module, hidden: normed(module, hidden, "weight")
    te.Linear.forward = lambda module, hidden, **_: linear(hidden, module.weight)
    te.LayerNormLinear.forward = lambda module, hidden, **_: linear(
        normed(module, hidden, "layer_norm_weight"), module.weight
    )
    te.DotProductAttention.forward = lambda _, query, key, value, *__, **___: attended(query, key, value)


def passes(model: LanguageModule, length: int = 6, rows: int = 2) -> dict[str, Tensor]:
    """Return states of each pass of the MTP layer, and the gradient of their weighted sum with respect to the trunk's
    states.
    """
    attached, chance = attached_of(model), torch.Generator().manual_seed(4)
    hidden_SBH = torch.randn(length, rows, model.config.hidden_size, generator=chance).requires_grad_()
    tokens_DBS = torch.randint(1, 256, (model.mtp.depths, rows, length), generator=chance)
    positions_BS = torch.arange(length).expand(rows, length)
    angles = attached.rotary_angles(length)[0] if attached.turns_heads else None
    attention = AttentionInputs(torch.ones(1, 1, length, length).triu(1).bool(), rotary_pos_emb=angles)
    trunk = attached.trunk_output(hidden_SBH, positions_BS, attention)
    positions, angles = [positions_BS] * model.mtp.depths, model.mtp.later_angles(trunk)
    inputs = DepthInputs(tokens_DBS, positions, model.embedding, attention, angles=angles)
    states_DSBH = torch.stack(model.mtp(hidden_SBH, inputs))
    (states_DSBH * torch.randn(states_DSBH.shape, generator=chance)).sum().backward()
    assert hidden_SBH.grad is not None
    return {"states": states_DSBH.detach(), "gradient": hidden_SBH.grad}
