"""Families without MTP layers: round trips of two sizes, Megatron's logits, faults that logits show, keys."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import differing_keys, make, read, write
from judged_models import PROMPT, QUIET, Logits
from tiers import tiered
from torch import Tensor
from transformers import AutoModelForCausalLM
from trunk_models import LEFT, TRUNKS, larger

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import kept_form
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.families import Family, Layout
from megatron_mtp.checkpoint.families.rules import Rule, Then, Transposed
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify.verify import all_reference_logits, compare, logits_of, verify
from megatron_mtp.cli.convert import main
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.model.rope import place

ALL = TRUNKS | LEFT
pytestmark = pytest.mark.usefixtures("forked_python")


class Converted:
    """A folder of every model, its checkpoint, and its export, each created on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, name: str) -> Path:
        made = self._root / name
        if not made.exists():
            (make(made, ALL[name], 0) / "tokenizer.json").unlink()
        return made

    def checkpoint(self, name: str) -> Path:
        made = self._root / f"{name}-mcore"
        if not made.exists():
            hf_to_mcore(self.folder(name), made, QUIET)
        return made

    def back(self, name: str) -> Path:
        made = self._root / f"{name}-back"
        return made if made.exists() else given_back(self.checkpoint(name), made)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(tmp_path_factory.mktemp("converted"))


FIRST = {"gpt_oss", *[*TRUNKS][::2]}
"""Models of the first tier."""


@pytest.fixture(scope="module")
def judged(converted: Converted, pytestconfig: pytest.Config) -> dict[str, Logits]:
    """Return transformers' logits of the models that Megatron runs, all from one process."""
    names = [name for name in TRUNKS if name in FIRST or pytestconfig.getoption("--all")]
    return dict(zip(names, all_reference_logits([converted.folder(name) for name in names], PROMPT), strict=True))


def given_back(mcore: Path, back: Path) -> Path:
    """Export a checkpoint as a Hugging Face folder."""
    form = kept_form(mcore)
    assert form is not None
    mcore_to_hf(mcore, back, Options(quiet=True, shard_bytes=100_000), form)
    return back


@pytest.mark.parametrize("name", tiered(ALL, [*ALL][::3]))
def test_a_round_trip_gives_back_every_bit_and_key(name: str, converted: Converted) -> None:
    assert_same_folder(converted.folder(name), converted.back(name))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ALL)
def test_a_round_trip_of_larger_shards_in_bfloat16_gives_back_every_bit_and_key(tmp_path: Path, name: str) -> None:
    source = make(tmp_path / "source", ALL[name], 0, torch.bfloat16, shards=True, changes=larger(name))
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    assert_same_folder(source, given_back(tmp_path / "mcore", tmp_path / "back"))


def assert_same_folder(source: Path, back: Path) -> None:
    theirs, ours = read(source), read(back)
    assert theirs.keys() == ours.keys()
    assert [name for name, tensor in theirs.items() if not same_bits(tensor, ours[name])] == []
    assert differing_keys(source, back) == {}


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


Fault = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""From the weights of a model by name, those that the fault makes wrong: what they should have been."""


def moved(ends: tuple[str, ...], dim: int) -> Fault:
    """Shift rows or columns by one."""

    def plant(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight.roll(1, dim) for name, weight in weights.items() if name.endswith(ends)}

    return plant


def norm_negated(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    ends = ("linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    return {name: -weights[name] for name in weights if name.startswith("decoder.layers.1.") and name.endswith(ends)}


def layers_exchanged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    one, other = "decoder.layers.1.", "decoder.layers.2."
    pairs = [(name, name.replace(one, other)) for name in weights if name.startswith(one)]
    found = {name: weights[pair] for here, there in pairs for name, pair in ((here, there), (there, here))}
    assert all(weights[name].shape == found[name].shape for name in found)
    return found


FAULTS: dict[str, Fault] = {
    "rows of queries moved": moved(("linear_qkv.weight", "linear_q_up_proj.weight"), 0),
    "columns of the output moved": moved(("linear_proj.weight",), 1),
    "rows of gate and up moved": moved(("linear_fc1.weight",), -2),
    "a norm's sign": norm_negated,
    "layers exchanged": layers_exchanged,
}
"""Faults that a round trip cannot show, because it undoes them."""


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", tiered(TRUNKS, FIRST))
def test_megatrons_logits_are_those_of_transformers_and_show_every_planted_fault(
    name: str, judged: dict[str, Logits], converted: Converted
) -> None:
    model = load_model(converted.checkpoint(name))
    place(model, PROMPT.positions_S.tolist())
    assert differing(judged[name], model) == []
    weights = {key: parameter.data for key, parameter in model.named_parameters()}
    for fault, plant in FAULTS.items():
        planted = {key: (weights[key].clone(), wrong.clone()) for key, wrong in plant(weights).items()}
        for key, (_, wrong) in planted.items():
            weights[key].copy_(wrong)
        assert differing(judged[name], model) == ["trunk logits, largest difference"], fault
        for key, (right, _) in planted.items():
            weights[key].copy_(right)


def differing(theirs: Logits, model: Any) -> list[str]:
    with torch.no_grad():
        return [check.name for check in compare(theirs, logits_of(model, PROMPT)) if not check.ok]


def rolled(ends: tuple[str, ...], dim: int) -> Callable[[Rule], Rule]:
    """Shift rows or columns of a rule's last part by one."""

    def plant(rule: Rule) -> Rule:
        wrong = rule.mcore and rule.mcore[-1].key.endswith(ends)
        return replace(rule, map=Then((rule.map, Rolled(dim)))) if wrong else rule

    return plant


class Rolled:
    """Shift rows or columns of a weight by one."""

    what = "rolled"

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.roll(1, self.dim) for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.roll(-1, self.dim) for tensor in tensors]


def plant_in_rules(plant: Callable[[Rule], Rule], monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Family.all_rules

    def faulty(family: Family, config: HFConfig, layout: Layout) -> list[Rule]:
        return [plant(rule) for rule in rules(family, config, layout)]

    monkeypatch.setattr(Family, "all_rules", faulty)


def in_halves(rule: Rule) -> Rule:
    """Read gate and up as halves, as in other families."""
    wrong = rule.mcore and rule.mcore[0].key.endswith("experts.linear_fc1.weight")
    return replace(rule, map=Transposed()) if wrong else rule


OWN_FAULTS: dict[str, Callable[[Rule], Rule]] = {
    "sinks of other heads": rolled(("softmax_offset",), 0),
    "gate and up in halves": in_halves,
    "biases of other channels": rolled(("experts.linear_fc1.bias",), 1),
    "biases of other experts": rolled(("experts.linear_fc2.bias",), 0),
    "the router's bias moved": rolled(("router.bias",), 0),
}


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_a_fault_in_the_rules_only_for_gpt_oss_is_detected(
    fault: str, judged: dict[str, Logits], converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_rules(OWN_FAULTS[fault], monkeypatch)
    hf_to_mcore(converted.folder("gpt_oss"), tmp_path / "mcore", QUIET)
    assert differing(judged["gpt_oss"], load_model(tmp_path / "mcore")) == ["trunk logits, largest difference"]


RUN = [name for name in LEFT if name != "nemotron_h_puzzle"]
"""Models that transformers has a class for."""


@pytest.mark.matrix
def test_transformers_gives_the_same_logits_after_a_round_trip(converted: Converted) -> None:
    folders, backs = ([made(name) for name in RUN] for made in (converted.folder, converted.back))
    logits = all_reference_logits([*folders, *backs], PROMPT)
    for name, theirs, ours in zip(RUN, logits[: len(RUN)], logits[len(RUN) :], strict=True):
        assert torch.equal(theirs["trunk"], ours["trunk"]), name
        assert theirs["trunk"].isfinite().all(), name


Spoil = Callable[[Path], None]


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    """Change the first matrix whose name contains this part."""

    def spoil(folder: Path) -> None:
        tensors = read(folder)
        key = next(key for key in sorted(tensors) if part in key and tensors[key].dim() > 1)
        write(folder, {**tensors, key: change(tensors[key])})

    return spoil


def layers_swapped(folder: Path) -> None:
    one, other = ".layers.1.", ".layers.2."
    tensors = read(folder)
    names = {name: name.replace(one, other) if one in name else name.replace(other, one) for name in tensors}
    write(folder, {name: tensors.get(other_name, tensors[name]) for name, other_name in names.items()})


def without_a_tensor(folder: Path) -> None:
    tensors = read(folder)
    write(folder, {name: tensors[name] for name in tensors if name != max(n for n in tensors if ".layers.1." in n)})


def another_base(folder: Path) -> None:
    keys = json.loads((folder / "config.json").read_text())
    keys["num_attention_heads"] //= 2
    keys["head_dim"] = 2 * (keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"] // 2)
    (folder / "config.json").write_text(json.dumps(keys))


SPOILT: dict[str, Spoil] = {
    "one bit of a layer": changed(".layers.", lambda weight: weight.nextafter(torch.tensor(torch.inf))),
    "rows of the embedding moved": changed("embed_tokens.weight", lambda weight: weight.roll(1, 0)),
    "layers swapped": layers_swapped,
    "a tensor missing": without_a_tensor,
    "another number of heads": another_base,
}


def faults(folder: Path, checkpoint: Path) -> list[str]:
    """Return the failed checks, or the message if the folder is rejected before."""
    try:
        return [check.name for check in verify(folder, checkpoint) if check.made and not check.ok]
    except ValueError as error:
        return [str(error)]


@pytest.mark.matrix
@pytest.mark.parametrize("name", RUN)
def test_verify_detects_every_fault_in_carried_tensors(name: str, converted: Converted, tmp_path: Path) -> None:
    for fault, spoil in SPOILT.items():
        folder = shutil.copytree(converted.folder(name), tmp_path / fault)
        spoil(folder)
        found = faults(folder, converted.checkpoint(name))
        assert len(found) == 1, fault
        assert fault != "a tensor missing" or re.search("lacks|has no place", found[0])


@pytest.mark.usefixtures("megatron")
def test_verify_proves_a_model_with_multipliers_whole(converted: Converted) -> None:
    checks = verify(converted.folder("granite"), converted.checkpoint("granite"))
    assert [(check.name, check.ok) for check in checks] == [
        ("tensors that are equal bit by bit, there and back", True),
        ("settings that differ", True),
        ("trunk logits, largest difference", True),
    ]


DRAFTED = [name for name in TRUNKS if not name.endswith("windows") and name not in ("ministral", "cwm")]
PROMPT_IDS, LENGTH = [5, 17, 44, 3, 60, 22, 9], 12


def greedy(folder: Path) -> list[int]:
    """Generate greedily with transformers, one forward pass per token."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), torch.tensor([PROMPT_IDS])
    with torch.no_grad():
        for _ in range(LENGTH):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT_IDS) :].tolist()


def attached(checkpoint: Path, at: Path) -> Path:
    """Return the same checkpoint with two MTP layers that copy its last layer."""
    assert main([*f"attach-mtp {checkpoint} {at}/attached --mtp-num-layers 2 --mtp-init last-layer".split()]) == 0
    return at / "attached"


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    "name",
    tiered(DRAFTED, ("granite", "smollm3", "gpt_oss")),
)
def test_a_text_drafted_by_attached_depths_is_that_of_transformers(
    name: str, converted: Converted, tmp_path: Path
) -> None:
    theirs, runner = greedy(converted.folder(name)), load_runner(attached(converted.checkpoint(name), tmp_path))
    drafted = generate(runner, [PROMPT_IDS], LENGTH, speculative={"method": "mtp", "num_speculative_tokens": 2})
    assert drafted.token_ids == [theirs]


@pytest.mark.usefixtures("megatron")
def test_a_model_with_windows_drafts(converted: Converted, tmp_path: Path) -> None:
    runner = load_runner(attached(converted.checkpoint("mistral-windows"), tmp_path))
    prompt = [[1, 5, 2, 8]]
    drafted = generate(runner, prompt, 24, speculative={"method": "mtp"})
    assert drafted.token_ids == generate(runner, prompt, 24).token_ids
