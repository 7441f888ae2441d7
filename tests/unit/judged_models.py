"""A small folder of every family, its bigram twin, and what transformers computes of both: one process judges all.

Import it only after `megatron_mtp.runtime.prepare()` (conftest.py does that).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from hf_models import MODELS, make, read, write
from torch import Tensor

from megatron_mtp.checkpoint.convert.export_hf import kept_form, mcore_to_hf
from megatron_mtp.checkpoint.convert.import_hf import depth_flags_of, hf_to_mcore
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.verify.depth_logits import depth_logits
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
}
"""Families that Megatron runs, and the depths of the folder."""
SPLIT = {
    "exaone_moe": 1,
    "ernie4_5_moe": 3,
    "mimo_v2_flash": 3,
    "longcat_flash": 1,
    "step3p5": 1,
    "step3p7": 3,
    "exaone4_5": 1,
    "glm_ocr": 3,
}
"""Families whose trunk is left to transformers."""
HYBRID = tuple(name for name in TRAINED if name.startswith(("qwen3_", "nemotron_h")))
"""Those whose trunks have recurrent layers."""
ZERO_CENTRED = ("qwen3_next", "qwen3_5", "step3p")
"""Families whose norms multiply by 1 + w."""
TOKENS_BS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(3))
PROMPT = Prompt.of(TOKENS_BS).stretched(HFConfig({"vocab_size": 96}, "any"), 0)
Logits = dict[str, Tensor]


@dataclass(frozen=True)
class Judged:
    """A folder, and what transformers computes of it and of what a checkpoint of it gives back.

    Attributes:
        given: None where Megatron runs the trunk.
    """

    folder: Path
    logits: Logits
    given: Logits | None


def judge_all(root: Path, names: Iterable[str] = ()) -> dict[tuple[str, bool], Judged]:
    """These families or all, by name and whether it is the bigram model."""
    folders: dict[tuple[str, bool], Path] = {}
    every = PLAIN | TRAINED | SPLIT
    for name, depths in ({name: every[name] for name in names} or every).items():
        folders[name, False] = make(root / name, name, depths)
        folders[name, True] = make(root / f"{name}-bigram", name, depths)
        write(folders[name, True], as_bigram(name, read(folders[name, True])))
    backs = {key: _there_and_back(folder) for key, folder in folders.items() if key[0] in SPLIT}
    logits = all_reference_logits([*folders.values(), *backs.values()], PROMPT)
    own = dict(zip(folders, logits, strict=False))
    given = dict(zip(backs, logits[len(folders) :], strict=True))
    return {key: Judged(folder, own[key], given.get(key)) for key, folder in folders.items()}


def _there_and_back(folder: Path) -> Path:
    mcore, back = folder.with_name(f"{folder.name}-mcore"), folder.with_name(f"{folder.name}-back")
    hf_to_mcore(folder, mcore, QUIET)
    form = kept_form(mcore)
    assert form is not None
    mcore_to_hf(mcore, back, QUIET, form)
    return back


def our_logits(judged: Judged, mcore: Path, prompt: Prompt = PROMPT) -> Logits:
    """Convert the folder and compute, as `verify` does."""
    hf_to_mcore(judged.folder, mcore, QUIET)
    if judged.given is None:
        return megatron_logits(mcore, prompt)
    model = HFModel.read(judged.folder)
    flags = depth_flags_of(model)
    assert flags is not None
    depths = depth_logits(mcore, model, flags, prompt, judged.given)
    return {"trunk": judged.given["trunk"], **depths}


def checks_of(name: str, judged: Judged, mcore: Path, prompt: Prompt = PROMPT) -> list[Check]:
    """The comparisons of all logits that `verify` makes."""
    ours = our_logits(judged, mcore, prompt)
    return compare(judged.logits, ours, rounding=partial(rounding, mcore, prompt, ours) if name in HYBRID else None)


def as_bigram(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Trunk and depths become the same bigram table: layers add nothing, norms are 1, depths pass on the embedding."""
    out = {key: _bigram(name, key, tensor) for key, tensor in tensors.items()}
    for key, original in OWN.items():
        out |= {own: out[original].clone() for own in out if own.endswith(key)}
    return out


OWN = {
    "mtp.embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.output.weight": "lm_head.weight",
}
"""A depth's own embedding and head, and those of the trunk that they must be."""
ADDS = ("o_proj.weight", "out_proj.weight", "dense.weight", "down_proj.weight", "down_proj")
"""Last tensors of what a layer adds."""
PROJECTIONS = ("eh_proj.weight", "mtp.fc.weight", "mtp_linear_proj")


def _bigram(name: str, key: str, tensor: Tensor) -> Tensor:
    if key.endswith(ADDS):
        return torch.zeros_like(tensor)
    if "norm" in key and tensor.dim() == 1:
        return torch.zeros_like(tensor) if name.startswith(ZERO_CENTRED) else torch.ones_like(tensor)
    if "router.e_score_correction_bias" in key:  # LongCat's last experts return what they get: none is to be chosen
        experts: int = MODELS[name].config["n_routed_experts"]
        return tensor - 100 * (torch.arange(tensor.size(0)) >= experts)
    eye, none = torch.eye(tensor.size(0)), torch.zeros(tensor.size(0), tensor.size(0))
    if key.endswith("input_proj.weight"):
        return torch.cat([none, eye], dim=1)
    return torch.cat([eye, none], dim=1) if any(part in key for part in PROJECTIONS) else tensor
