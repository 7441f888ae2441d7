"""Models of Transformer Engine's own modules, built, saved and loaded on a CPU, which cannot run them."""

import re
from argparse import Namespace
from pathlib import Path
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.training.arguments import validate_args
from safetensors.torch import load_file, save_file

from megatron_mtp.checkpoint.mcore.iterations import iteration_folder
from megatron_mtp.model import arguments
from megatron_mtp.model.arguments import config_of
from megatron_mtp.model.build import build, join_world
from megatron_mtp.model.latent_attention import PLAIN_QUERIES

COMMON = """
    --num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16 --seq-length 64
    --max-position-embeddings 64 --vocab-size 256 --mtp-num-layers 1 --micro-batch-size 1 --train-iters 1 --lr 1e-4
    --attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion
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
OF_MEGATRON = "query-norms"
"""A checkpoint as Megatron's own module has plain queries: behind a norm, which DeepSeek-V2-Lite does not have."""

FUSED_STATE = re.compile(r"linear_(q|kv|qkv)_down_proj\._extra_state$")
"""States of FP8 that Megatron's fused down-projection saves under two names, and does not find again."""

WEIGHTS = "weights.safetensors"


def made(kind: str) -> tuple[Namespace, LanguageModule]:
    """A model as training would build it, with random weights, norms among them."""
    flags = f"{COMMON} {KINDS[kind]} --transformer-impl transformer_engine"
    args = arguments.parsed(flags.split(), 256)
    args.padded_vocab_size, args.tokenizer_type = 256, "NullTokenizer"
    args.distributed_backend, args.num_workers, args.use_cpu_initialization = "gloo", 0, True
    validate_args(args)
    model = build(config_of(args))
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data = 1 + torch.randn_like(weight) / 4
    return args, model


def weights(model: LanguageModule) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: value.float().contiguous() for name, value in state.items() if "_extra_state" not in name}


def save(folder: str) -> None:
    """A checkpoint of every kind, as Megatron saves it, and beside it the weights by their names in the model."""
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
    """Load conversions, converted/KIND, with Megatron's default strictness, and compare every weight."""
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
        apart = model.load_state_dict(loaded["model"], strict=False)  # as Megatron, where a strict load fails
        assert all(FUSED_STATE.search(name) for name in (*apart.missing_keys, *apart.unexpected_keys)), apart
        given, found = load_file(Path(folder, kind, WEIGHTS)), weights(model)
        assert given.keys() == found.keys()
        assert not [name for name, value in given.items() if not torch.equal(value, found[name])], kind
