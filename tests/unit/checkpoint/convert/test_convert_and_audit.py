"""Every fault that a conversion rejects, an audit finds: small folders of all families, each with one faulty tensor."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, Tensors, make, read, write
from tiers import tiered
from trunk_models import LEFT, TRUNKS

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.plan import HFModel

ALL = MODELS | TRUNKS | LEFT
FAMILIES = [name for name in ALL if name != "nemotron_h_puzzle"]  # no rule or class describes its layers
FIRST = ("step3p5", "qwen3_next")
IN_DEPTH = re.compile(r"(^|\.)mtp|layers\.[3-5]\.")
GUESSES: dict[str, set[str]] = {
    "row lost": {"shape"},
    "axes moved": {"shape"},
    "key lost": {"tensor missing", "depth incomplete", "MTP dropped", "depth missing"},
    "name wrong": {"tensor missing", "depth incomplete", "MTP dropped", "depth missing"},
    "left over": {"tensor left over"},
}
"""Explanations that fit each fault."""


def spoilt(whole: Tensors, name: str) -> Iterator[tuple[str, Tensors]]:
    """Yield the tensors with each fault of one of them."""
    tensor = whole[name]
    other = re.sub(r"(\.\w+)$", r"_x\1", name)
    yield "row lost", {**whole, name: tensor[:-1].contiguous()}
    if tensor.dim() > 1 and len({*tensor.shape}) > 1:
        yield "axes moved", {**whole, name: tensor.movedim(0, -1).contiguous()}
    yield "key lost", {key: one for key, one in whole.items() if key != name}
    yield "name wrong", {other if key == name else key: one for key, one in whole.items()}
    yield "left over", {**whole, other: tensor.clone()}


def chosen(whole: Tensors, seed: str) -> list[str]:
    """Return a matrix of the trunk's layers, and one of its MTP layers."""
    inside = sorted(name for name, tensor in whole.items() if re.search(r"(layers|mtp_block)\.\d+\.", name))
    matrices = [name for name in inside if whole[name].dim() > 1 and "vis" not in name and not name.endswith(COPIES)]
    places = ([name for name in matrices if bool(IN_DEPTH.search(name)) == depth] for depth in (False, True))
    return [random.Random(seed).choice(names) for names in places if names]


COPIES = ("embed_tokens.weight", "head.weight")
"""Tensors that folders may omit."""


@pytest.mark.parametrize("name", tiered(FAMILIES, FIRST))
def test_audit_explains_every_fault_that_convert_rejects(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", ALL[name], ALL[name].depths[-1], torch.bfloat16)
    whole = read(folder)
    assert (refused(folder), alarms(folder)) == ("", [])
    for tensor in chosen(whole, name):
        for fault, tensors in spoilt(whole, tensor):
            write(folder, tensors)
            reason, found = refused(folder), alarms(folder)
            if name in WRAPPED and fault == "left over":
                continue  # both pass it through, like everything around a text model
            assert reason, f"{fault}, {tensor}: the conversion takes it"
            guesses = {one["guess"] for one in found}
            assert guesses & GUESSES[fault], f"{fault}, {tensor}: {guesses}, and the conversion says: {reason}"
            assert not guesses - GUESSES[fault] - {"tensor left over", "tensor misnamed"}, (
                f"{fault}, {tensor}: {guesses}"
            )


WRAPPED = ("glm4v_moe", "intern_s2_preview", "nemotron_h_omni", "nemo_speechlm", "qwen3_5")


def refused(folder: Path) -> str:
    """Return why a conversion rejects the folder; empty if it does not."""
    try:
        HFModel.read(folder)
    except ValueError as error:
        return str(error)
    return ""


def alarms(folder: Path) -> list[dict[str, Any]]:
    return [one for one in audit(folder)["findings"] if one["severity"] != "note"]
