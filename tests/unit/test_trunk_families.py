"""Families without depths of their own: round trips of two sizes, Megatron's logits, faults that logits show, keys."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_models import make, read, write
from judged_models import PROMPT, QUIET, Logits
from tiers import tiered
from torch import Tensor
from transformers import AutoModelForCausalLM
from trunk_models import LEFT, TRUNKS, larger

from megatron_mtp.checkpoint.convert.export_hf import kept_form, mcore_to_hf
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore, megatron_arguments
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.families import Family, Layout
from megatron_mtp.checkpoint.families.rules import Piece, Rule, Same, Then, Transposed
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.verify.verify import all_reference_logits, compare, megatron_logits, verify
from megatron_mtp.cli.convert import main
from megatron_mtp.decoding.api import generate
from megatron_mtp.decoding.load import load_runner

ALL = TRUNKS | LEFT
pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Logits]]:
    """A folder of every model, and transformers' logits of it: one process computes all."""
    root = tmp_path_factory.mktemp("folders")
    folders = {name: make(root / name, model, 0) for name, model in TRUNKS.items()}
    logits = all_reference_logits(list(folders.values()), PROMPT)
    return {name: (folder, found) for (name, folder), found in zip(folders.items(), logits, strict=True)}


@pytest.mark.parametrize("size", tiered(["small", "larger"], ("larger",)))
@pytest.mark.parametrize("name", ALL)
def test_a_round_trip_gives_back_every_bit_and_key(tmp_path: Path, name: str, size: str) -> None:
    changes = larger(name) if size == "larger" else {}
    source = make(tmp_path / "source", ALL[name], 0, torch.bfloat16, shards=size == "larger", changes=changes)
    back = there_and_back(source)
    theirs, ours = read(source), read(back)
    assert theirs.keys() == ours.keys()
    assert [name for name, tensor in theirs.items() if not same_bits(tensor, ours[name])] == []
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, back)]
    assert configs[0] == configs[1]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", TRUNKS)
def test_megatrons_logits_are_those_of_transformers(
    name: str, judged: dict[str, tuple[Path, Logits]], tmp_path: Path
) -> None:
    folder, theirs = judged[name]
    assert failed(folder, theirs, tmp_path / "mcore") == []


def failed(folder: Path, theirs: Logits, mcore: Path) -> list[str]:
    hf_to_mcore(folder, mcore, QUIET, megatron_arguments)
    return [check.name for check in compare(theirs, megatron_logits(mcore, PROMPT)) if not check.ok]


class Rolled:
    """The rows or columns of a weight moved on by one."""

    what = "rolled"

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.roll(1, self.dim) for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.roll(-1, self.dim) for tensor in tensors]


class Negated(Same):
    """A norm whose weight has another sign."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [-tensor for tensor in tensors]

    backward = forward


def rolled(ends: tuple[str, ...], dim: int) -> Callable[[Rule], Rule]:
    def plant(rule: Rule) -> Rule:
        wrong = rule.mcore and rule.mcore[-1].key.endswith(ends)
        return replace(rule, map=Then((rule.map, Rolled(dim)))) if wrong else rule

    return plant


def norm_negated(rule: Rule) -> Rule:
    ends = ("linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    wrong = rule.mcore and rule.mcore[0].key.startswith("decoder.layers.1.") and rule.mcore[0].key.endswith(ends)
    return replace(rule, map=Negated()) if wrong else rule


def layers_exchanged(rule: Rule) -> Rule:
    return replace(rule, mcore=tuple(exchanged(piece) for piece in rule.mcore))


def exchanged(piece: Piece) -> Piece:
    one, other = "decoder.layers.1.", "decoder.layers.2."
    keys = [
        key.replace(one, other) if key.startswith(one) else key.replace(other, one)
        for key in (piece.key, *piece.aliases)
    ]
    return replace(piece, key=keys[0], aliases=tuple(keys[1:]))


FAULTS: dict[str, Callable[[Rule], Rule]] = {
    "rows of queries moved": rolled(("linear_qkv.weight", "linear_q_up_proj.weight"), 0),
    "columns of the output moved": rolled(("linear_proj.weight",), 1),
    "rows of gate and up moved": rolled(("linear_fc1.weight",), -2),
    "a norm's sign": norm_negated,
    "layers exchanged": layers_exchanged,
}
"""Faults in the rules themselves, which a round trip cannot see."""


@pytest.mark.matrix
@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", TRUNKS)
def test_a_planted_fault_is_seen(
    name: str, fault: str, judged: dict[str, tuple[Path, Logits]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_rules(FAULTS[fault], monkeypatch)
    assert failed(*judged[name], tmp_path / "mcore") == ["trunk logits, largest difference"]


def plant_in_rules(plant: Callable[[Rule], Rule], monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Family.all_rules

    def faulty(family: Family, config: HFConfig, layout: Layout) -> list[Rule]:
        return [plant(rule) for rule in rules(family, config, layout)]

    monkeypatch.setattr(Family, "all_rules", faulty)


def in_halves(rule: Rule) -> Rule:
    """Gate and up taken for halves, as other families have them."""
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
def test_a_fault_of_what_gpt_oss_alone_has_is_seen(
    fault: str, judged: dict[str, tuple[Path, Logits]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_rules(OWN_FAULTS[fault], monkeypatch)
    assert failed(*judged["gpt_oss"], tmp_path / "mcore") == ["trunk logits, largest difference"]


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Logits, Logits]]:
    """Transformers' logits of every model whose layers are carried, and of what its checkpoint gives back."""
    root = tmp_path_factory.mktemp("carried")
    folders = [make(root / name, model, 0) for name, model in LEFT.items()]
    backs = [there_and_back(folder) for folder in folders]
    logits = all_reference_logits([*folders, *backs], PROMPT)
    return dict(zip(LEFT, zip(logits[: len(LEFT)], logits[len(LEFT) :], strict=True), strict=True))


def there_and_back(folder: Path) -> Path:
    mcore, back = folder.with_name(f"{folder.name}-mcore"), folder.with_name(f"{folder.name}-back")
    hf_to_mcore(folder, mcore, QUIET, megatron_arguments)
    form = kept_form(mcore)
    assert form is not None
    mcore_to_hf(mcore, back, Options(quiet=True, shard_bytes=100_000), form)
    return back


@pytest.mark.matrix
@pytest.mark.parametrize("name", LEFT)
def test_transformers_computes_the_same_of_what_was_carried(
    name: str, carried: dict[str, tuple[Logits, Logits]]
) -> None:
    theirs, ours = carried[name]
    assert torch.equal(theirs["trunk"], ours["trunk"])
    assert theirs["trunk"].isfinite().all()


Spoil = Callable[[Path], None]


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    """A change of the first matrix in whose name this stands."""

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


@pytest.mark.matrix
@pytest.mark.parametrize("fault", SPOILT)
@pytest.mark.parametrize("name", LEFT)
def test_verify_sees_a_fault_of_what_is_carried(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "hf", LEFT[name], 0)
    hf_to_mcore(folder, tmp_path / "mcore", QUIET, megatron_arguments)
    SPOILT[fault](folder)
    monkeypatch.setattr("megatron_mtp.checkpoint.verify.verify._why_not_compared", lambda *_: "bits are enough here")
    if fault == "a tensor missing":
        with pytest.raises(ValueError, match=r"lacks|has no place"):
            verify(folder, tmp_path / "mcore")
    else:
        wrong = [check.name for check in verify(folder, tmp_path / "mcore") if check.made and not check.ok]
        assert len(wrong) == 1


@pytest.mark.usefixtures("megatron")
def test_verify_proves_a_model_with_multipliers_whole(tmp_path: Path, judged: dict[str, tuple[Path, Logits]]) -> None:
    folder = judged["granite"][0]
    hf_to_mcore(folder, tmp_path / "mcore", QUIET, megatron_arguments)
    assert [(check.name, check.ok) for check in verify(folder, tmp_path / "mcore")] == [
        ("tensors that are equal bit by bit, there and back", True),
        ("settings that differ", True),
        ("trunk logits, largest difference", True),
    ]


DRAFTED = [name for name in TRUNKS if not name.endswith("windows") and name not in ("ministral", "cwm")]
PROMPT_IDS, LENGTH = [5, 17, 44, 3, 60, 22, 9], 12


def greedy(folder: Path) -> list[int]:
    """The text by transformers, a forward for every token."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), torch.tensor([PROMPT_IDS])
    with torch.no_grad():
        for _ in range(LENGTH):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT_IDS) :].tolist()


def attached(folder: Path, at: Path) -> Path:
    """A checkpoint of the model with two depths that repeat its last layer."""
    (folder / "tokenizer.json").unlink()
    hf_to_mcore(folder, at / "mcore", QUIET, megatron_arguments)
    assert main([*f"attach-mtp {at}/mcore {at}/attached --mtp-num-layers 2 --mtp-init last-layer".split()]) == 0
    return at / "attached"


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    "name",
    tiered(DRAFTED, ("granite", "smollm3", "gpt_oss")),
)
def test_a_text_drafted_by_attached_depths_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", TRUNKS[name], 0)
    theirs, runner = greedy(folder), load_runner(attached(folder, tmp_path))
    drafted = generate(runner, [PROMPT_IDS], LENGTH, speculative={"method": "mtp", "num_speculative_tokens": 2})
    assert drafted.token_ids == [theirs]


@pytest.mark.usefixtures("megatron")
def test_drafting_refuses_windows(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", TRUNKS["mistral-windows"], 0)
    with pytest.raises(ValueError, match="attends to a sliding window"):
        load_runner_and_draft(attached(folder, tmp_path))


def load_runner_and_draft(folder: Path) -> None:
    generate(load_runner(folder), [PROMPT_IDS], LENGTH, speculative={"method": "mtp", "num_speculative_tokens": 2})
