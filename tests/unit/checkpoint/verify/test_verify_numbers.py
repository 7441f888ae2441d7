"""Numbers in a `config.json`: `verify` catches each one that changes a transformers logit by 1e-3.

The checkpoint stays as converted; one number in the folder's config changes. transformers determines, on its own
prompt, whether that number matters.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make
from scalings import LLAMA3, YARN
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.verify import verify as verify_module
from megatron_mtp.checkpoint.verify.prompt import Prompt
from megatron_mtp.checkpoint.verify.reference import all_logits, quieten
from megatron_mtp.checkpoint.verify.verify import verify

pytestmark = pytest.mark.usefixtures("megatron")

MODELS: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "llama": (0, LLAMA3, {"rope_theta", "factor", "rms_norm_eps"}),
    "deepseek_v3": (
        1,
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.8},
        {"rope_theta", "factor", "mscale", "mscale_all_dim", "routed_scaling_factor", "topk_group"},
    ),
    "glm4_moe": (1, {}, {"rope_theta", "partial_rotary_factor", "routed_scaling_factor", "topk_group"}),
    "qwen3_next": (1, {}, {"rope_theta", "partial_rotary_factor", "rms_norm_eps"}),
    "nemotron_h": (1, {}, {"routed_scaling_factor"}),
}
"""Number of MTP layers, changes to the rotary settings, and numbers that `verify`'s logits must show."""
LONG = Prompt(
    torch.randint(0, 96, (1, 160), generator=torch.Generator().manual_seed(5)),
    torch.cat([torch.arange(144), 144 * 2 ** torch.arange(1, 17) // 2]),
    144,
)
"""The prompt for transformers: long, with distant positions."""


def numbers(keys: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the config with each number changed alone, by name."""
    for name, value in keys.items():
        if isinstance(value, dict):
            yield from ((inner, {**keys, name: changed}) for inner, changed in numbers(value))
        elif isinstance(value, bool):
            yield name, {**keys, name: not value}
        elif isinstance(value, int | float) and not name.endswith("_token_id"):
            yield name, {**keys, name: other(value)}


def other(value: float) -> float:
    if isinstance(value, int):
        return value - 1 if value > 1 else value + 1
    return 1e-3 if value < 1e-3 else value / 2


def logits_of(folder: Path, prompt: Prompt) -> Tensor | None:
    """Return logits of trunk and MTP layers; None if transformers rejects the folder."""
    try:
        with torch.no_grad():
            found = all_logits(folder, prompt.tokens_BS, prompt.positions_S)
    except Exception:  # transformers raises any type for a config that contradicts its tensors
        return None
    return torch.cat([value for name, value in found.items()])


def failed(folder: Path, mcore: Path) -> set[str]:
    """Return what shows the difference: `settings`, `trunk` or `depth`; `refused` if one of the two cannot be read."""
    try:
        return {check.name.split()[0] for check in verify(folder, mcore) if check.made and not check.ok}
    except Exception:  # ours or transformers'
        return {"refused"}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run transformers in this process, and Megatron once, since the checkpoint is fixed; a process takes seconds."""

    def here(folders: list[Path], prompt: Prompt, with_depths: bool = True) -> list[dict[str, Tensor]]:
        with torch.no_grad():
            return [all_logits(folder, prompt.tokens_BS, prompt.positions_S) for folder in folders]

    original, kept = verify_module.megatron_logits, dict[tuple[Path, bool], dict[str, Tensor]]()

    def once(mcore: Path, prompt: Prompt, nudged: bool = False) -> dict[str, Tensor]:
        if (mcore, nudged) not in kept:
            kept[mcore, nudged] = original(mcore, prompt, nudged)
        return kept[mcore, nudged]

    quieten()
    monkeypatch.setattr(verify_module, "all_reference_logits", here)
    monkeypatch.setattr(verify_module, "megatron_logits", once)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", tiered(MODELS, ("llama",)))
def test_every_number_that_changes_a_logit_is_seen(name: str, tmp_path: Path) -> None:
    depths, rope, expected = MODELS[name]
    source = make(tmp_path / "hf", name, depths)
    keys = json.loads((source / "config.json").read_text())
    if rope:
        keys["rope_parameters"] = {**keys["rope_parameters"], **rope}
        keys.pop("rope_theta", None)
    (source / "config.json").write_text(json.dumps(keys))
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True, workers=1))
    assert failed(source, tmp_path / "mcore") == set()
    whole = logits_of(source, LONG)
    assert whole is not None
    seen: dict[str, set[str]] = {}
    for number, changed in numbers(keys):
        (source / "config.json").write_text(json.dumps(changed))
        theirs = logits_of(source, LONG)
        if theirs is not None and theirs.shape == whole.shape and (theirs - whole).abs().max() > 1e-3:
            seen[number] = failed(source, tmp_path / "mcore")
    assert [number for number in seen if not seen[number]] == []
    assert [number for number in sorted(expected) if not seen[number] & {"trunk", "depth"}] == []
