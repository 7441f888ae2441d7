"""The records in `golden/`: the rules of every family, and all names that users type or store."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import golden_rules
import golden_surface
import pytest
from documents import ROOT

from megatron_mtp.checkpoint.families import OWN, Family, Layout
from megatron_mtp.checkpoint.families.rules import Rule, SwapHalves, Transposed
from megatron_mtp.checkpoint.hf.config import HFConfig

RULES: dict[str, Any] = json.loads(golden_rules.FILE.read_text(encoding="utf-8"))
FAMILIES = {family.model_types[0]: family for family in OWN}
AS_MEANT = "if it is meant, run `python tests/unit/golden_rules.py`, read the difference and commit it"
AS_TOLD = (
    "users know these names; if the change is meant, tell it in CHANGELOG.md (what went, and what to use now), run "
    "`python tests/unit/golden_surface.py`, and commit all in one"
)


def test_the_record_has_every_family_and_no_other() -> None:
    assert sorted(RULES["families"]) == sorted(FAMILIES), AS_MEANT
    assert list(RULES["around a text model"]) == golden_rules.WRAPPERS, AS_MEANT


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rules_of_a_family_are_those_of_the_record(name: str) -> None:
    assert differences(RULES["families"][name], golden_rules.of_family(FAMILIES[name])) == [], AS_MEANT


@pytest.mark.parametrize("name", golden_rules.WRAPPERS)
def test_the_rules_around_a_text_model_are_those_of_the_record(name: str) -> None:
    assert differences(RULES["around a text model"][name], golden_rules.around(name)) == [], AS_MEANT


@pytest.mark.skipif(not (ROOT / "megatron_mtp/extensions").is_dir(), reason="the record has the extensions' verbs")
@pytest.mark.usefixtures("megatron")
def test_what_users_type_and_store_is_that_of_the_record() -> None:
    recorded = json.loads(golden_surface.FILE.read_text(encoding="utf-8"))
    assert differences(recorded, golden_surface.record()) == [], AS_TOLD


def differences(recorded: object, found: object, where: str = "") -> list[str]:
    """What is recorded and not found (-), and what is found and not recorded (+)."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        names = [*recorded, *(name for name in found if name not in recorded)]
        pairs = ((name, recorded.get(name), found.get(name)) for name in names)
        return [line for name, one, other in pairs for line in differences(one, other, f"{where}{name}: ")]
    if isinstance(recorded, list) and isinstance(found, list) and recorded != found:
        lacks = [f"- {where}{one}" for one in recorded if one not in found]
        return lacks + [f"+ {where}{one}" for one in found if one not in recorded] or [f"{where}another order"]
    same = recorded == found or (
        isinstance(recorded, str) and isinstance(found, str) and flags(recorded) == flags(found)
    )
    return [] if same else [f"- {where}{recorded}", f"+ {where}{found}"]


def flags(line: str) -> list[str] | dict[str, list[str]]:
    """The flags of a command line with their values, in no order; of two of a name the last counts."""
    words = [part.split() for part in f" {line}".split(" --")]
    return {name: values for name, *values in words[1:]} if line.startswith("--") else [line]


def swapped(rule: Rule) -> Rule:
    """Up before gate."""
    return replace(rule, hf=rule.hf[::-1]) if rule.mcore[0].key.endswith("linear_fc1.weight") else rule


def transposed(rule: Rule) -> Rule:
    """A weight as if the folder stored it as [input, output]."""
    return replace(rule, map=Transposed()) if rule.mcore[0].key.endswith("linear_proj.weight") else rule


def halved(rule: Rule) -> Rule:
    return replace(rule, map=SwapHalves(0)) if rule.mcore[0].key == "output_layer.weight" else rule


def renamed(rule: Rule) -> Rule:
    (piece, *others) = rule.mcore
    return replace(rule, mcore=(replace(piece, key=piece.key.replace("final_layernorm", "final_norm")), *others))


@pytest.mark.parametrize("plant", [swapped, transposed, halved, renamed])
def test_a_planted_fault_is_seen(plant: Callable[[Rule], Rule]) -> None:
    def rules(config: HFConfig, layout: Layout) -> list[Rule]:
        return [plant(rule) for rule in FAMILIES["llama"].rules(config, layout)]

    planted: Family = replace(FAMILIES["llama"], rules=rules)
    assert differences(RULES["families"]["llama"], golden_rules.of_family(planted)) != []
