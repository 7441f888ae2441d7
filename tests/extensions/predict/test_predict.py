"""Predicted acceptance: every engine's rules against plain rounds, the causes, and the command."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_folders import OWN_LATENTS, make_drafter, make_trunk
from hf_models import make
from hybrid_single import our_hybrid
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron_single import LATENT, MOE, our_model
from tiers import tiered
from torch import Tensor
from written_datasets import write_dataset

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.families import FAMILIES
from megatron_mtp.cli import main as cli
from megatron_mtp.cli.convert import main as convert
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.extensions.predict.acceptance import Sample, accepted, predicted, rounds
from megatron_mtp.extensions.predict.engines import (
    ENGINES,
    FIRST_PASS_KEYS,
    SHARED_KEYS,
    TRAINED,
    WORDS,
    Feeding,
    differences,
)
from megatron_mtp.extensions.predict.rows import Text, check_model, drafts, read_text, trained_feeding
from megatron_mtp.extensions.predict.source import cut_prompts, read_ids
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.chain import DepthInputs
from megatron_mtp.model.trunk_output import AttentionInputs
from megatron_mtp.spec.kinds import DRAFTERS

COUNT = 3
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


# --- a plain reference: one round, one sequence, no blocks, only a causal mask
# -----------------------------------------


def depth_of(
    model: LanguageModule, number: int, states_SBH: Tensor, ids: list[int], zeroed: bool
) -> tuple[Tensor, Tensor]:
    """Return states [S, 1, H] of an MTP layer over a sequence, before and after its final norm."""
    layer, slots = model.mtp.layers[number], len(ids)
    embedded_SBH = model.embedding(torch.tensor([ids]), torch.arange(slots)[None]).clone()
    if zeroed:
        embedded_SBH[0] = 0
    norm, layer.final_layernorm = layer.final_layernorm, torch.nn.Identity()
    before_SBH = layer(states_SBH, embedded_SBH, angles_of(model, slots))
    layer.final_layernorm = norm
    return before_SBH, norm(before_SBH)


def angles_of(model: LanguageModule, slots: int) -> AttentionInputs:
    """Return the rotary angles of a sequence; latent attention computes its own, and Nemotron's attention has none."""
    return AttentionInputs(rotary_pos_emb=model.rotary_pos_emb(slots) if attached_of(model).turns_heads else None)


def likeliest(model: LanguageModule, state_SBH: Tensor) -> int:
    return int(attached_of(model).head().project(state_SBH[-1:])[0, 0].argmax())


def reused_round(
    model: LanguageModule, text: Text, start: int, trunk: str, chained: str, zeroed: bool, first_row: bool = False
) -> list[int]:
    """Run depth 1 over the known tokens with the trunk's states, then on its own state, as EAGLE drafts."""
    states_SBH, ids = text.states(trunk)[: start + 1], text.tokens[1 : start + 2]
    if first_row:
        states_SBH, ids = torch.cat([torch.zeros_like(states_SBH[:1]), states_SBH]), [text.tokens[0], *ids]
    made = []
    for number in range(COUNT):
        before_SBH, after_SBH = depth_of(model, 0, states_SBH, ids, zeroed)
        made.append(likeliest(model, after_SBH))
        state_SBH = after_SBH if chained == "after" else before_SBH
        states_SBH, ids = torch.cat([states_SBH, state_SBH[-1:]]), [*ids, text.tokens[start + 2 + number]]
    return made


def own_round(
    model: LanguageModule, text: Text, start: int, trunk: str = "after", chained: str = "after", zeroed: bool = False
) -> list[int]:
    """Run depth by depth, each over all rows of the previous depth."""
    states_SBH, made = text.states(trunk)[: start + 1], []
    for number in range(COUNT):
        ids = text.tokens[1 + number : start + 2 + number]
        before_SBH, after_SBH = depth_of(model, number, states_SBH, ids, zeroed)
        made.append(likeliest(model, after_SBH))
        states_SBH = after_SBH if chained == "after" else before_SBH
    return made


def window_round(model: LanguageModule, text: Text, start: int) -> list[int]:
    """Run depth by depth; states and tokens shift by one, and the last output is appended (TensorRT-LLM's example)."""
    states_SBH, ids, made = text.after_SBH[: start + 1], text.tokens[1 : start + 2], []
    for number in range(COUNT):
        _, after_SBH = depth_of(model, number, states_SBH, ids, zeroed=False)
        made.append(likeliest(model, after_SBH))
        states_SBH = torch.cat([states_SBH[1:], after_SBH[-1:]])
        ids = [*ids[1:], text.tokens[start + 2 + number]]
    return made


Round = Callable[[LanguageModule, Text, int], list[int]]


def reused(trunk: str, chained: str, zeroed: bool, first_row: bool = False) -> Round:
    return lambda model, text, start: reused_round(model, text, start, trunk, chained, zeroed, first_row)


def own(trunk: str, chained: str, zeroed: bool) -> Round:
    return lambda model, text, start: own_round(model, text, start, trunk, chained, zeroed)


IN_VLLM: dict[str, tuple[str, str, bool]] = {
    "glm4_moe": ("after", "before", True),
    "glm4_moe_lite": ("after", "before", True),
    "deepseek_v3": ("after", "after", True),
    "hy_v3": ("after", "after", True),
    "qwen3_next": ("after", "after", False),
    "qwen3_5": ("after", "after", False),
    "intern_s2_preview": ("after", "after", False),
    "nemotron_h": ("after", "after", False),
    "mimo": ("before", "after", True),
}
"""For each family: the state of draft 1, that of later drafts, and whether position 0 gets zeros."""
IN_SGLANG = "glm4_moe deepseek_v3 glm4_moe_lite bailing_moe hy_v3 qwen3_next qwen3_5 nemotron_h".split()
"""Families whose states are taken after the norm and whose position 0 is kept."""
FIRST_TIER: dict[tuple[str, str, int], Round] = {
    ("vllm", "glm4_moe", 2): reused(*IN_VLLM["glm4_moe"]),
    ("vllm", "deepseek_v3", 2): reused(*IN_VLLM["deepseek_v3"]),
    ("vllm", "mimo", 1): reused(*IN_VLLM["mimo"]),
    ("vllm", "qwen3_5", 1): reused(*IN_VLLM["qwen3_5"]),
    ("vllm", "nemotron_h", 1): reused(*IN_VLLM["nemotron_h"]),
    ("vllm-v2", "glm4_moe", 3): own(*IN_VLLM["glm4_moe"]),
    ("vllm-v2", "deepseek_v3", 3): own(*IN_VLLM["deepseek_v3"]),
    ("vllm-v2", "mimo", 3): own(*IN_VLLM["mimo"]),
    ("sglang", "mimo", 1): reused("after", "after", zeroed=True),
    ("sglang", "bailing_moe", 1): reused("after", "after", zeroed=False),
    ("transformers", "glm4_moe", 3): own_round,
    ("transformers", "deepseek_v3", 3): own_round,
    ("llama.cpp", "glm4_moe", 1): reused("after", "after", zeroed=False, first_row=True),
    ("tensorrt-llm", "glm4_moe", 3): window_round,
    ("tensorrt-llm", "deepseek_v3", 3): window_round,
}
"""The plain round for each engine, family and number of MTP layers."""
ROUNDS: dict[tuple[str, str, int], Round] = {
    **{(engine, family, 1): reused(*rules) for engine in ("vllm", "vllm-v2") for family, rules in IN_VLLM.items()},
    **{("sglang", family, 1): reused("after", "after", zeroed=False) for family in IN_SGLANG},
    ("tensorrt-llm", "glm4_moe", 1): reused("after", "after", zeroed=False),
    ("tensorrt-llm", "deepseek_v3", 1): reused("after", "after", zeroed=False),
    **FIRST_TIER,
}
"""The same with all others, most of which run alike."""
KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm4_moe", "hy_v3", "bailing_moe"), MOE),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), LATENT),
    "mimo": {},
}
GATED: dict[str, Any] = {"attention_output_gate": True}
HYBRIDS: dict[str, Callable[[], LanguageModule]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "intern_s2_preview"), lambda: our_hybrid("G-*-/*-", **GATED)),
    "nemotron_h": lambda: our_hybrid("M*E/*E", position="none", **MOE),
}


def model_of(family: str) -> LanguageModule:
    return (HYBRIDS[family]() if family in HYBRIDS else our_model(3, **KINDS[family])).eval()


@pytest.mark.parametrize(("engine", "family", "depths"), tiered(ROUNDS, FIRST_TIER))
@torch.no_grad()
def test_the_rules_of_an_engine_reproduce_its_drafts(engine: str, family: str, depths: int) -> None:
    model = model_of(family)
    text = read_text(model, TOKENS)
    made = drafts(model, text, COUNT, ENGINES[engine].feeding(family, depths))
    for start in range(COUNT - 1, len(TOKENS) - COUNT - 1):
        plain = ROUNDS[engine, family, depths](model, text, start)
        assert [draft[start] for draft in made] == plain, start


def test_every_engine_and_family_has_a_reference_round() -> None:
    assert {case[:2] for case in ROUNDS} == {(name, family) for name, one in ENGINES.items() for family in one.families}


@pytest.mark.parametrize("changes", [{}, MOE, LATENT, {"mtp_use_repeated_layer": True}], ids=str)
@torch.no_grad()
def test_training_rules_reproduce_the_drafts_of_the_mtp_block(changes: dict[str, Any]) -> None:
    compare_with_block(our_model(COUNT, **changes).eval(), TRAINED)


@pytest.mark.parametrize("pattern", ["M*-/*-/*-/*-", "G*/*E/*E/*E"])
@torch.no_grad()
def test_training_rules_reproduce_the_drafts_of_a_hybrid(pattern: str) -> None:
    compare_with_block(our_hybrid(pattern, **MOE if "E" in pattern else {}).eval(), TRAINED)


@torch.no_grad()
def test_shared_kv_rules_reproduce_a_block_trained_with_shared_kv() -> None:
    model = our_model(COUNT, mtp_use_repeated_layer=True, shares_kv=True).eval()
    compare_with_block(model, SHARED_KEYS)


@pytest.mark.parametrize("changes", [{}, LATENT], ids=str)
@torch.no_grad()
def test_pass_1_kv_rules_reproduce_a_block_trained_with_them(changes: dict[str, Any]) -> None:
    model = our_model(COUNT, mtp_use_repeated_layer=True, first_pass_kv=True, **changes).eval()
    assert trained_feeding(model) == FIRST_PASS_KEYS
    compare_with_block(model, FIRST_PASS_KEYS)


def compare_with_block(model: LanguageModule, feeding: Feeding) -> None:
    text, starts = read_text(model, TOKENS), len(TOKENS) - COUNT - 1
    made = drafts(model, text, COUNT, feeding)
    tokens_DBS = torch.tensor([[TOKENS[depth : depth + starts]] for depth in range(1, COUNT + 1)])
    attention = angles_of(model, starts)
    positions_BS = torch.arange(starts)[None]
    trunk = attached_of(model).trunk_output(text.after_SBH[:starts], positions_BS, attention)
    positions, angles = [positions_BS] * COUNT, model.mtp.later_angles(trunk)
    inputs = DepthInputs(tokens_DBS, positions, model.embedding, attention, angles=angles)
    states = model.mtp(trunk.hidden_SBH, inputs)
    for draft, state_SBH in zip(made, states, strict=True):
        assert draft == attached_of(model).head().project(state_SBH)[:, 0].argmax(-1).tolist()


@torch.no_grad()
def test_a_uniform_norm_between_depths_changes_no_draft() -> None:
    """GLM-4 MoE in vLLM: the next depth normalizes again, so that only the weights of the norm in between matter."""
    model = our_model(3).eval()
    text = read_text(model, TOKENS)
    before, after = Feeding(chained="before"), TRAINED
    assert drafts(model, text, COUNT, before) != drafts(model, text, COUNT, after)
    for layer in model.mtp.layers:
        layer.final_layernorm.weight.fill_(0.7)
    assert drafts(model, text, COUNT, before) == drafts(model, text, COUNT, after)


# --- the table -------------------------------------------------------------------------------------------------------


def test_engines_expect_the_eh_proj_order_that_an_export_writes() -> None:
    for engine in ENGINES.values():
        for family, rules in engine.families.items():
            stored = FAMILIES[family].depths
            assert stored is not None
            assert rules.embedding_first == stored.embedding_first, (engine.title, family)


def test_every_rule_has_a_description_and_a_source() -> None:
    for engine in ENGINES.values():
        for family in engine.families:
            for depths in (1, 3):
                feeding = engine.feeding(family, depths)
                for row in fields(Feeding):
                    assert (row.name, getattr(feeding, row.name)) in WORDS
                    assert engine.source_of(row.name, family).startswith(f"{engine.repository}: ")


def test_differences_omit_rules_that_a_single_draft_never_uses() -> None:
    feeding = ENGINES["vllm"].feeding("glm4_moe", 2)
    assert [each.rule for each in differences(TRAINED, feeding, 2)] == ["module", "chained", "zeroed", "keys"]
    assert [each.rule for each in differences(TRAINED, feeding, 1)] == ["zeroed"]
    assert [each.rule for each in differences(TRAINED, Feeding(keys="none"), 1)] == ["keys"]


def test_one_mtp_layer_has_no_difference_in_the_drafting_layer() -> None:
    feeding = ENGINES["sglang"].feeding("glm4_moe", 1)
    assert [each.rule for each in differences(trained_feeding(our_model(1)), feeding, COUNT)] == ["keys"]
    repeated = our_model(COUNT, mtp_use_repeated_layer=True, shares_kv=True)
    assert differences(trained_feeding(repeated), feeding, COUNT) == []
    assert [each.rule for each in differences(trained_feeding(our_model(2)), feeding, 2)] == ["module", "keys"]


# --- acceptance ------------------------------------------------------------------------------------------------------


def test_rounds_match_a_hand_computed_example() -> None:
    """Tokens 0 1 | 2 3 4 5 6 7: the round at row 1 keeps two drafts, the one at row 4 keeps one."""
    sample = Sample([0, 1, 2, 3, 4, 5, 6, 7], prompt=2, end=7)
    first = [9, 3, 9, 9, 6, 9]  # first draft of the round after row i, for token i + 2
    second = [9, 4, 9, 9, 9, 9]
    assert rounds([first, second], sample) == [2, 1]


@torch.no_grad()
def text_of_drafts(model: LanguageModule, feeding: Feeding, length: int) -> list[int]:
    """Return a text in which the first draft by these rules is always right."""
    tokens = [3, 5]
    while len(tokens) < length:
        made = drafts(model, read_text(model, [*tokens, 0]), 1, feeding)
        tokens.append(made[0][-1])
    return tokens


def test_swapped_eh_proj_halves_are_named_as_the_cause() -> None:
    model = our_model(1).eval()
    sample = Sample(text_of_drafts(model, TRAINED, 20), prompt=4, end=18)
    feeding = ENGINES["transformers"].feeding("glm4_moe", 1)
    right = predicted(model, [sample], 1, feeding)
    assert right.engine.accepted_per_position == [1.0]
    assert right.causes == []
    weight = model.mtp.layers[0].eh_proj.weight
    weight.data = weight.data.roll(weight.size(1) // 2, dims=1)
    wrong = predicted(model, [sample], 1, feeding)
    assert wrong.engine.accepted_per_forward < 0.5
    assert [cause.difference.rule for cause in wrong.causes] == ["swapped"]
    assert wrong.causes[0].undone.accepted_per_position == [1.0]


def test_causes_are_measured_one_by_one_and_sorted() -> None:
    """MiMo in vLLM: the state before the norm loses all acceptance here, and the zeroed embedding almost nothing."""
    model = our_model(1).eval()
    with torch.no_grad():
        model.decoder.final_layernorm.weight.mul_(torch.linspace(-3, 3, 32))
    sample = Sample(text_of_drafts(model, TRAINED, 24), prompt=4, end=22)
    calls: list[None] = []
    found = predicted(model, [sample], 1, ENGINES["vllm"].feeding("mimo", 1), lambda: calls.append(None))
    assert len(calls) == 1
    assert found.trained.accepted_per_position == [1.0]
    assert [cause.difference.rule for cause in found.causes] == ["trunk", "zeroed"]
    assert found.causes[0].undone.accepted_per_forward > found.engine.accepted_per_forward + 0.3
    text = read_text(model, sample.tokens)
    undone = accepted(model, text, sample, 1, Feeding(module="first", keys="chain", zeroed=True))
    assert found.causes[0].undone == undone


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a random GLM-4 MoE of two MTP layers with a tokenizer, and a text."""
    place = tmp_path_factory.mktemp("predict")
    text = "".join(f"the model drafts {number} tokens and keeps {number % 7}\n" for number in range(200))
    (place / "text.txt").write_text(text)
    train_bpe([text], 258, place / "tokenizer")
    make(place / "glm", "glm4_moe", 2, changes={"vocab_size": 258, "max_position_embeddings": 128})
    return place


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        status = cli.main(["predict", *map(str, arguments)])
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capsys.readouterr()
    return status, shown.out, shown.err


SMALL = ("--prompts", "2", "--prompt-tokens", "6", "--new-tokens", "12")


def test_the_command_prints_text_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (folder / "glm", "--text", folder / "text.txt", "--tokenizer", folder / "tokenizer", *SMALL)
    status, shown, _ = told(capsys, *given, "--engine", "vllm")
    assert status == 0
    assert "as trained" in shown
    assert "every draft by depth 1 (in training: every draft by its own depth)" in shown
    assert "(vllm-project/vllm: vllm/model_executor/models/glm4_moe_mtp.py)" in shown
    figures = json_of(told(capsys, *given, "--engine", "sglang", "--num-speculative-tokens", "3", "--json"))
    assert figures["depths_limit"] == 1
    config = figures["speculative_config"]
    assert config["rejection_sample_method"] == "synthetic"
    assert len(config["synthetic_acceptance_rates"]) == config["num_speculative_tokens"] == 3
    assert len(figures["acceptance_as_trained"]) == 2


@pytest.mark.matrix
def test_a_table_has_a_line_for_every_checkpoint_and_engine_that_can_be_computed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--text", folder / "text.txt", "--tokenizer", folder / "tokenizer", *SMALL)
    alone = json_of(told(capsys, folder / "glm", *given, "--engine", "vllm", "--json"))
    asked = (folder / "glm", "nowhere", *given, "--table", "--engine", "vllm", "--engine", "transformers")
    status, shown, _ = told(capsys, *asked, "--json")
    table = json.loads(shown)
    assert status == 1
    row, other = table["rows"]
    assert row == {**alone, "checkpoint": str(folder / "glm"), "engine": "vllm"}
    assert other["acceptance"] == other["acceptance_as_trained"] == row["acceptance_as_trained"]
    assert [(one["checkpoint"], one["engine"]) for one in table["failed"]] == [
        ("nowhere", "vllm"),
        ("nowhere", "transformers"),
    ]
    head, first, *others = told(capsys, *asked)[1].splitlines()
    assert head.split()[:5] == ["checkpoint", "engine", "family", "depths", "K"]
    rates = " ".join(f"{100 * rate:.1f}" for rate in row["acceptance"])
    assert first.split()[1:5] == ["vllm", "glm4_moe", "2", "2"]
    assert first.split()[-3:] == [*rates.split(), f"{1 + row['accepted_per_round']:.3f}"]
    assert [line.split(":")[0] for line in others[1:]] == ["no line"] * 2


def json_of(answer: tuple[int, str, str]) -> dict[str, Any]:
    status, shown, said = answer
    assert status == 0, said
    return dict(json.loads(shown))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere", "--engine", "vllm"), "neither a Megatron checkpoint nor a Hugging Face folder"),
        (("glm", "--engine", "nowhere"), "invalid choice"),
        (("glm", "--engine", "vllm", "--num-speculative-tokens", "0"), "give 1 to 15"),
        (("glm", "--engine", "vllm", "--num-speculative-tokens", "3"), "a multiple of it"),
        (("glm", "--engine", "vllm-v2", "--num-speculative-tokens", "3"), "give at most 2"),
        (("glm", "--engine", "transformers", "--num-speculative-tokens", "1"), "with all MTP layers of the folder"),
        (("glm", "--engine", "vllm", "--prompts", "0"), "--prompts is 0"),
        (("glm", "--engine", "vllm", "--prompts", "10000"), "give more text"),
        (("glm", "--engine", "vllm", "--new-tokens", "500"), "positions"),
        (("glm", "--engine", "vllm", "--family", "mimo"), "leave --family out"),
        (("glm", "--engine", "vllm", "--engine", "sglang"), "add --table"),
    ],
)
def test_bad_input_is_rejected_with_a_clear_error(
    folder: Path, arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, *flags = arguments
    texts = ("--text", folder / "text.txt", "--tokenizer", folder / "tokenizer")
    status, shown, said = told(capsys, folder / path, *texts, *flags)
    assert (status, shown) == (2, "")
    assert sentence in said
    assert said.count("\n") == 1


def test_a_family_that_an_engine_lacks_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"no rules of llama.cpp .* 'mimo', .* for glm4_moe"):
        ENGINES["llama.cpp"].feeding("mimo", 1)


@torch.no_grad()
def test_a_depth_with_recurrent_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the MTP layers are stacks M- .* measure them as trained"):
        check_model(our_hybrid("M*-/M-").eval())


def test_layers_that_an_engine_does_not_build_in_depths_are_refused() -> None:
    ENGINES["vllm"].check_layers("nemotron_h", "*E")
    with pytest.raises(ValueError, match=r"the MTP layers are stacks \*-, and vLLM .* from \*E alone"):
        ENGINES["vllm"].check_layers("nemotron_h", "*-")
    ENGINES["vllm"].check_layers("qwen3_5", "*-")


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("nemotron_h", marks=pytest.mark.matrix)])
def test_a_hybrid_is_predicted(family: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(tmp_path / "hf", family, 1, changes={"vocab_size": 258, "max_position_embeddings": 128})
    texts = ("--text", folder / "text.txt", "--tokenizer", folder / "tokenizer")
    figures = json_of(told(capsys, made, *texts, *SMALL, "--engine", "vllm", "--json"))
    assert figures["acceptance"] == figures["acceptance_as_trained"]
    assert figures["causes"] == []
    assert figures["depths"] == 1


# --- drafters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a random Llama of eight layers with an EAGLE-3 drafter fitted to it."""
    place = tmp_path_factory.mktemp("drafter")
    changes = {"vocab_size": 258, "max_position_embeddings": 128, "num_hidden_layers": 8}
    hf_to_mcore(make(place / "hf", "llama", 0, changes=changes), place / "trunk", Options(quiet=True))
    corpus = write_dataset(place / "corpus", [list(range(3, 3 + length)) for length in range(40, 60)])
    assert convert(["fit-drafter", f"{place}/trunk", f"{place}/fitted", "--data-path", str(corpus)]) == 0
    return place / "fitted"


def test_a_drafter_is_predicted_or_refused_by_its_kind(
    folder: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (drafter, "--text", folder / "text.txt", "--tokenizer", folder / "tokenizer", *SMALL)
    status, shown, _ = told(capsys, *given, "--engine", "llama.cpp")
    assert status == 0
    assert "(run: tests/functional/test_drafters_in_llama_cpp.py)" in shown
    assert "llama with an EAGLE-3 drafter, 7 drafts a round" in shown
    assert "It feeds the drafter as training does (ggml-org/llama.cpp: common/speculative.cpp)." in shown
    status, _, said = told(capsys, *given, "--engine", "transformers")
    assert status == 2
    assert "no rules of transformers 5.23 for the drafter 'eagle3'; it has them for no kind of drafters" in said


@pytest.mark.matrix
def test_a_drafter_is_predicted_by_our_own_decoder(
    folder: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (drafter, "--text", folder / "text.txt", "--tokenizer", folder / "tokenizer", *SMALL)
    figures = json_of(told(capsys, *given, "--engine", "vllm", "--num-speculative-tokens", "2", "--json"))
    assert figures["speculative_config"]["method"] == figures["drafter"] == "eagle3"
    ids, _ = read_ids([str(folder / "text.txt")], folder / "tokenizer", False)
    config = {"method": "eagle3", "num_speculative_tokens": 2}
    runner = load_runner(drafter, 258, torch.float32)
    stats = generate(runner, cut_prompts(ids, 2, 6), 12, speculative=config).stats
    assert figures["acceptance"] == [round(rate, 4) for rate in stats.accepted_per_position]
    assert figures["rounds"] == stats.offered_at[0]
    row = json_of(told(capsys, *given, "--engine", "vllm", "--table", "--json"))["rows"][0]
    assert (
        told(capsys, *given, "--engine", "vllm", "--table")[1].splitlines()[1].split()[1:5]
        == "vllm llama eagle3 7".split()
    )
    assert row["depths"] == 0


def test_a_drafter_with_latent_attention_has_a_class_of_its_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: Llama's class was named for it, with evidence from a run without latent attention."""
    _, trunk = make_trunk(tmp_path, vocab_size=258)
    _, made = make_drafter(tmp_path, "eagle3-latents", trunk, OWN_LATENTS)
    given = (made, "--text", folder / "text.txt", "--tokenizer", folder / "tokenizer", *SMALL)
    for engine, file in (("vllm", "deepseek_eagle3.py"), ("sglang", "kimi_k25_eagle3.py")):
        status, shown, _ = told(capsys, *given, "--engine", engine)
        assert status == 0
        assert "(read in its source)" in shown
        assert f"/{file})." in shown
    status, _, said = told(capsys, *given, "--engine", "llama.cpp")
    assert status == 2
    assert "no rules of llama.cpp of October 2026 for the drafter 'eagle3' with latent attention" in said


def test_every_drafter_kind_in_the_table_exists_here() -> None:
    assert {kind for engine in ENGINES.values() for kind in engine.drafters} <= {*DRAFTERS}


def test_an_old_verb_name_still_runs_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["foretell", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: megatron-mtp predict ")
    assert shown.err == "megatron-mtp: foretell is predict now; the old name works for one release.\n"
