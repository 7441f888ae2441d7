"""The records in `golden/`: the rules of every family, and all names that users type or store."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from difflib import unified_diff
from typing import Any

import golden_rules
import golden_sentences
import golden_surface
import pytest
from documents import ROOT

from megatron_mtp.checkpoint.families import Layout, own_families
from megatron_mtp.checkpoint.families.rules import Rule, SwapHalves, Transposed
from megatron_mtp.checkpoint.hf.config import HFConfig

RULES: dict[str, Any] = json.loads(golden_rules.FILE.read_text(encoding="utf-8"))
FAMILIES = {family.model_types[0]: family for family in own_families()}
AS_MEANT = "if it is meant, run `python tests/support/golden_rules.py` and commit the file with the change"
AS_TOLD = (
    "users know these names; if the change is meant, tell it in CHANGELOG.md (what went, and what to use now), run "
    "`python tests/support/golden_surface.py`, and commit all in one"
)


def test_messages_match_the_record() -> None:
    kept = golden_sentences.FILE.read_text(encoding="utf-8").splitlines()
    differ = [line for line in unified_diff(kept, golden_sentences.record().splitlines(), n=0, lineterm="") if line]
    assert differ == [], "if they are meant, run `python tests/support/golden_sentences.py`, and read the difference"


def test_the_record_has_every_family_and_no_other() -> None:
    assert sorted(RULES["families"]) == sorted(FAMILIES), AS_MEANT
    assert list(RULES["around a text model"]) == golden_rules.WRAPPERS, AS_MEANT


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rules_of_a_family_are_those_of_the_record(name: str) -> None:
    changed = changes("families", name, golden_rules.of_family(FAMILIES[name]))
    assert not changed, "\n".join([AS_MEANT, *changed])


@pytest.mark.parametrize("name", golden_rules.WRAPPERS)
def test_the_rules_around_a_text_model_are_those_of_the_record(name: str) -> None:
    changed = changes("around a text model", name, golden_rules.around(name))
    assert not changed, "\n".join([AS_MEANT, *changed])


def changes(kind: str, name: str, found: object) -> list[str]:
    """Return nothing if the digest matches the record, else the lines that differ from the commit that wrote it."""
    if golden_rules.digest(found) == RULES[kind][name]:
        return []
    try:
        before = golden_rules.of_commit(None)[kind].get(name)
    except (OSError, subprocess.CalledProcessError) as error:
        return [f"the digest is another; the lines that differ are not to be had: {error}"]
    return golden_rules.differences(before, json.loads(json.dumps(found))) or ["the record is not of its own commit"]


@pytest.mark.skipif(not (ROOT / "megatron_mtp/extensions").is_dir(), reason="the record has the extensions' verbs")
@pytest.mark.usefixtures("megatron")
def test_flags_and_stored_keys_match_the_record() -> None:
    recorded = json.loads(golden_surface.FILE.read_text(encoding="utf-8"))
    assert golden_rules.differences(recorded, golden_surface.record()) == [], AS_TOLD


def swapped(rule: Rule) -> Rule:
    """Put up before gate."""
    return replace(rule, hf=rule.hf[::-1]) if rule.mcore[0].key.endswith("linear_fc1.weight") else rule


def transposed(rule: Rule) -> Rule:
    """Read a weight as if the folder stored it as [input, output]."""
    return replace(rule, map=Transposed()) if rule.mcore[0].key.endswith("linear_proj.weight") else rule


def halved(rule: Rule) -> Rule:
    return replace(rule, map=SwapHalves(0)) if rule.mcore[0].key == "output_layer.weight" else rule


def renamed(rule: Rule) -> Rule:
    (piece, *others) = rule.mcore
    return replace(rule, mcore=(replace(piece, key=piece.key.replace("final_layernorm", "final_norm")), *others))


PLANTED: dict[Callable[[Rule], Rule], str] = {
    swapped: "+ everything: rules: model.layers.{a}.mlp.up_proj.weight",
    transposed: "transposed",
    halved: "rows' halves swapped",
    renamed: "-> decoder.final_norm.weight",
}
"""For each fault in a family, a part of the printed difference."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(plant: Callable[[Rule], Rule]) -> None:
    def rules(config: HFConfig, layout: Layout) -> list[Rule]:
        return [plant(rule) for rule in FAMILIES["llama"].rules(config, layout)]

    before, now = (
        golden_rules.of_family(family) for family in (FAMILIES["llama"], replace(FAMILIES["llama"], rules=rules))
    )
    assert golden_rules.digest(now) != golden_rules.digest(before)
    assert PLANTED[plant] in "\n".join(golden_rules.differences(before, now))


@pytest.mark.matrix
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository's history: run it in a clone")
def test_the_rules_of_a_commit_are_recomputed() -> None:
    written = golden_rules.of_commit(None)
    digests = {kind: {name: golden_rules.digest(one) for name, one in made.items()} for kind, made in written.items()}
    assert digests == RULES
