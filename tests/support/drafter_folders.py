"""A trunk's checkpoint; a random folder and its checkpoint for every kind of drafter; and faults of such folders."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hf_models import VOCABULARY, filled, make
from judged_models import QUIET
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_mtp.checkpoint.convert.drafter_codec import CODECS
from megatron_mtp.checkpoint.convert.drafter_form import DrafterForm, attention_in, sizes_of
from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter, plan_drafter
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.megatron.checkpoint import EMBEDDING
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.model.arguments import trunk_spec
from megatron_mtp.spec.head import HeadSpec

Change = Callable[[dict[str, Tensor]], object]
Pairs = dict[str, tuple[Path, Path]]
LAYERS, WIDTH = 5, 40
DRAFTED = sorted({*range(0, VOCABULARY, 3), 1})
READ, WHOLE = {"drafter_ffn_hidden_size": WIDTH, "drafter_layers": [1, 2, 4]}, [*range(VOCABULARY)]
BLOCKS = {
    "drafter_ffn_hidden_size": WIDTH,
    "drafter_layers": [1, 3],
    "drafter_steps": 3,
    "drafter_num_layers": 2,
    "drafter_mask_token": 7,
}
BIASED = {**BLOCKS, "drafter_markov_rank": 6}
PARALLEL = {**READ, "drafter_num_layers": 2, "drafter_mask_token": 7}
KINDS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "eagle3": ("eagle3", READ, DRAFTED),
    "eagle3-whole": ("eagle3", READ, WHOLE),
    "eagle3-latents": ("eagle3", READ, DRAFTED),
    "eagle": ("eagle", {"drafter_ffn_hidden_size": WIDTH}, WHOLE),
    "dflash": ("dflash", BLOCKS, WHOLE),
    "dspark": ("dspark", BIASED, DRAFTED),
    "dspark-idle": ("dspark", {**BIASED, "drafter_idle_rows": 1}, DRAFTED),
    "eagle3-window": ("eagle3", {**READ, "drafter_window_size": 3, "drafter_norm_before_residual": 1}, DRAFTED),
    "dflash-windows": ("dflash", {**BLOCKS, "drafter_window_size": 4, "drafter_full_layers": [2]}, WHOLE),
    "dspark-sinks": (
        "dspark",
        {**BIASED, "drafter_window_size": 3, "drafter_causal": 1, "drafter_softmax_type": "learnable"},
        DRAFTED,
    ),
    "dflash2": ("dflash2", BIASED, WHOLE),
    "domino": ("domino", {**BIASED, "drafter_gru_size": 10}, WHOLE),
    "domino-idle": (
        "domino",
        {**BIASED, "drafter_gru_size": 10, "drafter_idle_rows": 1, "drafter_window_size": 4, "drafter_causal": 1},
        WHOLE,
    ),
    "peagle": ("peagle", PARALLEL, DRAFTED),
    "peagle-windows": (
        "peagle",
        {**PARALLEL, "drafter_window_size": 4, "drafter_full_layers": [1], "drafter_norm_before_residual": 1},
        WHOLE,
    ),
    "dflash2-windows": (
        "dflash2",
        {**BIASED, "drafter_window_size": 4, "drafter_full_layers": [1], "drafter_causal": 2},
        WHOLE,
    ),
}
"""Drafters of a trunk of five layers, and their draft vocabularies."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 1.0}
OWN_SIZES = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "rms_norm_eps": 1e-4,
    "rope_theta": 500.0,
}


OWN_LATENTS: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "rope_interleave": True,
    "rms_norm_eps": 1e-4,
    "rope_theta": 500.0,
}
LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
OWN_LATENTS["rope_scaling"] = LATENT_YARN
SIZES = {"eagle3-latents": OWN_LATENTS}
"""Sizes of the kinds that do not use the default."""


def make_pairs(root: Path) -> Pairs:
    """Create folder and checkpoint of every kind, and of the trunk, under `root`."""
    trunk = make_trunk(root)
    return {"trunk": trunk, **{name: make_drafter(root, name, trunk[1], SIZES.get(name)) for name in KINDS}}


def make_trunk(root: Path, family: str = "llama", **changes: object) -> tuple[Path, Path]:
    """Create the folder and the checkpoint of a trunk under `root`."""
    folder = make(root / "trunk", family, 0, changes={"num_hidden_layers": LAYERS, **changes})
    hf_to_mcore(folder, root / "trunk-mcore", QUIET)
    return folder, root / "trunk-mcore"


def make_drafter(root: Path, name: str, trunk: Path, sizes: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """Create the exported folder of a kind and its checkpoint under `root`.

    Args:
        sizes: sizes of its layers, if not the default ones.
    """
    kind_name, settings, drafted = KINDS[name]
    args = DistReader(trunk).common()["args"]
    kind = HeadSpec.resolve(kind_name, settings, trunk_spec(args))
    if sizes is not None:
        keys = {**sizes_of(kind, args.hidden_size), **sizes}
        kind = replace(kind, attention=attention_in(Path("config.json"), keys, "kv_lora_rank" in sizes))
    reduced = len(drafted) < VOCABULARY
    codec, lists = CODECS[kind.kind], ("d2t", "t2d") if reduced else ()
    has_head = reduced or codec.has_own_head
    own = codec.layer_names[0], codec.has_embedding
    form = DrafterForm(kind, args.hidden_size, torch.arange(len(drafted)), has_head, lists, *own)
    torch.manual_seed(3)
    tensors = {}
    for rule in form.rules():
        for one in rule.hf:
            tensors[one.name] = filled(one.name, torch.empty(one.shape or ()), torch.float32)
        if rule.mcore[0].key == EMBEDDING:
            tensors[rule.hf[0].name] = DistReader(trunk).read(EMBEDDING)[:VOCABULARY].clone()
        if rule.hf and rule.mcore[0].key.endswith("draft_vocabulary"):
            rows = rule.to_hf([torch.tensor(drafted)])
            tensors |= {one.name: tensor for one, tensor in zip(rule.hf, rows, strict=True)}
    config = {
        "architectures": [form.architecture],
        "model_type": "llama",
        **form.sizes,
        "intermediate_size": kind.ffn,
        "num_hidden_layers": kind.depth,
        "draft_vocab_size": len(drafted),
        **codec.keys(kind),
    }
    given, saved, exported = (root / f"{name}-{part}" for part in ("given", "mcore", "folder"))
    given.mkdir()
    (given / "config.json").write_text(json.dumps(config))
    save_file(tensors, given / "model.safetensors")
    plan_attaching_drafter(trunk, given).write(saved, QUIET)
    plan_drafter(saved, QUIET).write(exported, QUIET)
    return exported, saved


def spoiled(source: Path, target: Path, change: Change, **keys: object) -> Path:
    """Copy a folder with changed tensors and keys; a key set to None is removed."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    config = {**json.loads((source / "config.json").read_text()), **keys}
    (target / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return target


def exchange(one: str, other: str) -> Change:
    return lambda tensors: tensors.update({one: tensors[other], other: tensors[one]})


def change(name: str, by: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: by(tensors[name]).contiguous()})


def another_token(tensors: dict[str, Tensor]) -> None:
    """Set the last draft to the token before its own, in both lists."""
    token = int(tensors["d2t"][-1]) + len(tensors["d2t"]) - 1
    tensors["d2t"][-1] -= 1
    tensors["t2d"][token], tensors["t2d"][token - 1] = False, True


def nothing(_: dict[str, Tensor]) -> None:
    pass


BLOCK, SELECTOR = {"target_layer_ids": [0, 2], "mask_token_id": 7}, "candidate_selector."
FAULTS: dict[str, tuple[str, Change, dict[str, object], str]] = {
    "norms of both halves exchanged": (
        "eagle3", exchange("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"), {}, "tensors"
    ),
    "one bit": ("eagle3", change("fc.weight", lambda one: one.nextafter(one.new_tensor(9.0))), {}, "tensors"),
    "rows of the head permuted": ("eagle3", change("lm_head.weight", lambda one: one.flip(0)), {}, "tensors"),
    "another token drafted": ("eagle3", another_token, {}, "tensors"),
    "not the trunk's head": ("eagle3-whole", change("lm_head.weight", lambda one: one * 2), {}, "tensors"),
    "halves of the input exchanged": (
        "eagle", change("fc.weight", lambda one: one.roll(one.shape[1] // 2, 1)), {}, "tensors"
    ),
    "another embedding": ("eagle", change("embed_tokens.weight", lambda one: one.flip(0)), {}, "tensors"),
    "rows of the bias permuted": (
        "dspark", change("markov_head.markov_w2.weight", lambda one: one.flip(0)), {}, "tensors"
    ),
    "layers exchanged": (
        "dflash", exchange("layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"), {}, "tensors"
    ),
    "rows of the kernel exchanged": (
        "dflash2", change("layers.1.mlp_conv.base_kernel", lambda one: one.flip(1)), {}, "tensors"
    ),
    "codebooks exchanged": (
        "dflash2", exchange(f"{SELECTOR}predecessor_codebook", f"{SELECTOR}successor_codebook"), {}, "tensors"
    ),
    "gates of the GRU exchanged": ("domino", change("prefix_gru.weight_ih_l0", lambda one: one.flip(0)), {}, "tensors"),
    "another state of masks": ("peagle", change("mask_hidden", lambda one: one * 2), {}, "tensors"),
    "another mask token": ("peagle", nothing, {"mask_token_id": 8}, "settings"),
    "norm of the latents permuted": (
        "eagle3-latents",
        change("midlayer.self_attn.kv_a_layernorm.weight", lambda one: one.flip(0)),
        {},
        "tensors",
    ),
    "another factor of the scores": (
        "eagle3-latents", nothing, {"rope_scaling": {**LATENT_YARN, "mscale_all_dim": 0.8}}, "settings"
    ),
    "another mask": ("dflash", nothing, {"dflash_config": BLOCK | {"mask_token_id": 8}}, "settings"),
    "another block": ("dspark", nothing, {"block_size": 4}, "settings"),
    "other layers read": ("dflash", nothing, {"dflash_config": BLOCK | {"target_layer_ids": [0, 3]}}, "settings"),
    "another epsilon": ("eagle3", nothing, {"rms_norm_eps": 1e-3}, "settings"),
    "another base": ("dspark", nothing, {"rope_theta": 500.0}, "settings"),
}  # fmt: skip
"""Faults: the kind, changes to its tensors and keys, and the check that fails."""
