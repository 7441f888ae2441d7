"""A small folder of every family, its bigram twin, and what transformers computes for both, all in one process.

Import it only after `megatron_mtp.megatron.runtime.prepare()` (conftest.py calls it).
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from hf_models import make, read, write
from torch import Tensor

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.verify.prompt import Prompt
from megatron_mtp.checkpoint.verify.verify import Check, all_reference_logits, compare, megatron_logits, rounding

QUIET = Options(quiet=True, workers=1)
PLAIN = {"llama": 0, "llama-tied": 0, "qwen2-mha": 0, "qwen3": 0}
TRAINED = {
    "mimo": 3,
    "deepseek_v3": 3,
    "kimi_k2": 1,
    "glm4_moe": 3,
    "glm4_moe-lean": 1,
    "bailing_moe": 3,
    "glm4_moe_lite": 3,
    "hy_v3": 3,
    "qwen3_next": 1,
    "qwen3_5": 1,
    "qwen3_5_text": 1,
    "qwen3_5_moe_text": 1,
    "qwen3_5_moe_text-packed": 1,
    "nemotron_h": 3,
    "nemotron_h-latent": 1,
    "sarvam_moe": 1,
    "sarvam_mla": 1,
    "glm4v_moe": 1,
    "intern_s2_preview": 1,
    "nemotron_h_omni": 1,
    "nemo_speechlm": 1,
}
"""Families that Megatron runs, and the number of MTP layers in the folder."""
HYBRID = tuple(name for name in TRAINED if name.startswith(("qwen3_", "nemo", "intern_s2")))
"""Families whose trunks have recurrent layers."""
ZERO_CENTRED = ("qwen3_next", "qwen3_5", "intern_s2")
"""Families whose norms multiply by 1 + w."""
TOKENS_BS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(3))
PROMPT = Prompt.of(TOKENS_BS).stretched(HFConfig({"vocab_size": 96}, "any"), 0)
Logits = dict[str, Tensor]


@dataclass(frozen=True)
class Judged:
    """A folder, and what transformers computes for it."""

    folder: Path
    logits: Logits


def judge_all(
    root: Path, names: Iterable[str] = (), bigrams: Container[str] | None = None
) -> dict[tuple[str, bool], Judged]:
    """Return these families, or all, keyed by name and whether it is the bigram model, created for `bigrams` or for
    all.
    """
    folders: dict[tuple[str, bool], Path] = {}
    every = PLAIN | TRAINED
    for name, depths in ({name: every[name] for name in names} or every).items():
        folders[name, False] = make(root / name, name, depths)
        if bigrams is None or name in bigrams:
            folders[name, True] = make(root / f"{name}-bigram", name, depths)
            write(folders[name, True], as_bigram(name, read(folders[name, True])))
    judged = zip(folders.values(), all_reference_logits([*folders.values()], PROMPT), strict=True)
    return {key: Judged(*one) for key, one in zip(folders, judged, strict=True)}


def our_logits(judged: Judged, mcore: Path, prompt: Prompt = PROMPT) -> Logits:
    """Convert the folder and compute logits, as `verify` does."""
    hf_to_mcore(judged.folder, mcore, QUIET)
    return megatron_logits(mcore, prompt)


def checks_of(name: str, judged: Judged, mcore: Path, prompt: Prompt = PROMPT) -> list[Check]:
    """Return all of `verify`'s comparisons of logits."""
    ours = our_logits(judged, mcore, prompt)
    return compare(judged.logits, ours, rounding=partial(rounding, mcore, prompt, ours) if name in HYBRID else None)


def as_bigram(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn trunk and MTP layers into the same bigram table: layers add nothing, norms are 1, MTP layers pass the
    embedding on.
    """
    return {key: _bigram(name, key, tensor) for key, tensor in tensors.items()}


ADDS = ("o_proj.weight", "out_proj.weight", "dense.weight", "down_proj.weight", "down_proj")
"""The last weights before each residual addition."""
PROJECTIONS = ("eh_proj.weight", "mtp.fc.weight")


def _bigram(name: str, key: str, tensor: Tensor) -> Tensor:
    if key.endswith(ADDS):
        return torch.zeros_like(tensor)
    if "norm" in key and tensor.dim() == 1:
        return torch.zeros_like(tensor) if name.startswith(ZERO_CENTRED) else torch.ones_like(tensor)
    eye, none = torch.eye(tensor.size(0)), torch.zeros(tensor.size(0), tensor.size(0))
    if key.endswith("input_proj.weight"):
        return torch.cat([none, eye], dim=1)
    return torch.cat([eye, none], dim=1) if any(part in key for part in PROJECTIONS) else tensor
