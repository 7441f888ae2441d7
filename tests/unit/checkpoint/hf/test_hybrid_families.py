"""Families with recurrent trunks: sizes and special cases, planted faults, MTP layers in plain code, files on disk.

`test_verify.py` has what they share with other families: logits of all of them, the bigram models, common faults.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import HIDDEN, Tensors, differing_keys, make, read, write
from judged_models import PROMPT, QUIET, Judged, judge_all
from tiers import tiered
from torch import Tensor
from torch.nn.functional import linear, silu

from megatron_mtp.checkpoint.convert import import_hf
from megatron_mtp.checkpoint.convert.computation import differences, settings_of
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import kept_form
from megatron_mtp.checkpoint.convert.import_hf import flags_of, hf_to_mcore, megatron_arguments
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.families import Family, Layout
from megatron_mtp.checkpoint.families.rules import Computed, Piece, Rule, SwapHalves, Then
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify import reference_forms
from megatron_mtp.checkpoint.verify.prompt import Prompt, random_tokens
from megatron_mtp.checkpoint.verify.reference import all_logits
from megatron_mtp.checkpoint.verify.verify import Check, compare, logits_of, megatron_logits, rounding, verify
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.model.rope import place

pytestmark = pytest.mark.usefixtures("forked_python", "megatron")

FAMILIES = {"qwen3_next": 1, "qwen3_5_text": 1, "qwen3_5_moe_text": 1, "nemotron_h": 3}
"""Models of these families, and the number of MTP layers."""
AllJudged = dict[tuple[str, bool], Judged]


def failed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if not check.ok}


# --- sizes and special cases ------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a dense layer among experts, as many keys as values": (
        "qwen3_next",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [1],
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "every second layer, three values a key": (
        "qwen3_5_text",
        {"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "head_dim": 8},
    ),
    "groups of experts behind a latent projection, MLPs": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "moe", "full_attention", "mlp", "mamba"],
            "mamba_num_heads": 6,
            "n_groups": 3,
            "mamba_head_dim": 4,
            "ssm_state_size": 5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "moe_latent_size": 12,
        },
    ),
}


@pytest.mark.parametrize("sizes", tiered(OTHERS, [*OTHERS][:1]))
def test_other_sizes_are_proved_and_come_back_bit_by_bit(sizes: str, tmp_path: Path) -> None:
    """In bfloat16, with float32 norms whose bits the difference to 1 would lose, and time steps below 0.001."""
    name, changes = OTHERS[sizes]
    source = make(tmp_path / "hf", name, 1, torch.bfloat16, changes=changes)
    tensors = {
        key: value.float() * 0.31 if key.endswith("linear_attn.norm.weight") else value
        for key, value in read(source).items()
    }
    tensors = {key: value - 9 if key.endswith("dt_bias") else value for key, value in tensors.items()}
    write(source, tensors)
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    assert failed(verify(source, tmp_path / "mcore")) == set()
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form)
    back = read(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert [
        key for key in back if back[key].dtype != tensors[key].dtype or not torch.equal(back[key], tensors[key])
    ] == []
    assert differing_keys(tmp_path / "back", source) == {}


def test_transformers_limits_time_steps_that_the_published_code_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the reference runs without that limit: huggingface/transformers#48989."""
    source = make(tmp_path / "hf", "nemotron_h", 1)
    write(source, {key: value - 9 if key.endswith("dt_bias") else value for key, value in read(source).items()})
    tokens_BS = random_tokens(HFConfig.read(source), 16, 0)
    with torch.no_grad():
        free = all_logits(source, tokens_BS)["trunk"]
        form = replace(reference_forms.FORMS["nemotron_h"], around=lambda config: config)
        monkeypatch.setattr(reference_forms, "FORMS", {"nemotron_h": form})
        limited = all_logits(source, tokens_BS)["trunk"]
    assert (free - limited).abs().max() > 1e-2


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "a rotary scaling"),
    ("qwen3_next", {"hidden_act": "gelu"}, "the activation 'gelu'"),
    ("qwen3_next", {"num_experts_per_tok": 1}, "router weights that are normed over one expert"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "'mlp_hidden_act' 'silu', where Megatron has relu2"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "'mamba_hidden_act' 'gelu', where Megatron has silu"),
    ("nemotron_h", {"layer_norm_epsilon": 1e-6}, "'layer_norm_epsilon' 1e-06, where Megatron has 1e-05"),
    ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "limits of time steps"),
    ("nemotron_h", {"time_step_limit": 0.1}, "limits of time steps"),
    ("nemotron_h", {"sliding_window": 512}, "sliding windows"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
def test_models_that_megatron_cannot_run_have_a_reason(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = make(tmp_path / "hf", name, 1)
    keys = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**keys, **changes}))
    flags, said = flags_of(HFModel.read(source))
    assert flags is None
    assert said is not None
    assert reason in said


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "'layer_types' has 'sliding_attention'; known are"),
    ("qwen3_next", {"mlp_only_layers": 3}, "'mlp_only_layers' is 3; it must be a list"),
    (
        "qwen3_5_text",
        {"linear_num_value_heads": 3},
        "'linear_num_value_heads' 3 is not a multiple of 'linear_num_key_heads' 2",
    ),
    ("nemotron_h", {"n_groups": 3}, "'mamba_num_heads' 4 is not a multiple of 'n_groups' 3"),
    ("nemotron_h", {"use_bias": True}, "'use_bias' and 'mamba_proj_bias' false"),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "rnn"]},
        "'layers_block_type' is ['mamba', 'rnn']; it must be a list",
    ),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "a text of M \\* - E"),
]


@pytest.mark.parametrize(("name", "changes", "says"), WRONG)
def test_an_impossible_config_gives_a_clear_error(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make(tmp_path / "hf", name, 1)
    keys = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**keys, **changes}))
    assert main(["hf-to-mcore", str(source), str(tmp_path / "mcore")]) == 2
    assert says.replace("\\", "") in capsys.readouterr().err


def test_stages_and_the_number_of_depths_are_not_model_settings(tmp_path: Path) -> None:
    """A run may split the trunk into stages, and repeat its MTP layer."""
    flags, _ = flags_of(HFModel.read(make(tmp_path / "hf", "qwen3_next", 1)))
    assert flags is not None
    args, other = parsed(flags, 96), parsed(flags, 96)
    assert other.hybrid_layer_pattern == "GEGEGE*E/*E"
    other.hybrid_layer_pattern, other.mtp_num_layers = "GEGE|GE*E/*E/*E", 2
    assert differences(settings_of(args), settings_of(other)) == []
    other.hybrid_layer_pattern = "GEGEGEGE/*E"
    assert differences(settings_of(args), settings_of(other))[0].startswith("hybrid_layer_pattern 'GEGEGE*E/*E'")


# --- planted faults --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> AllJudged:
    return judge_all(tmp_path_factory.mktemp("folders"), FAMILIES)


class Spoilt:
    """A map that then damages those of its tensors whose keys have this suffix."""

    what = "spoilt"

    def __init__(self, rule: Rule, ending: tuple[str, ...], fault: Callable[[Tensor], Tensor]) -> None:
        self.rule, self.ending, self.fault = rule, ending, fault

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        made = self.rule.map.forward(tensors)
        hit = [piece.key.endswith(self.ending) for piece in self.rule.mcore]
        return [self.fault(value) if is_hit else value for value, is_hit in zip(made, hit, strict=True)]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.rule.map.backward(tensors)


def spoiling(*ending: str, fault: Callable[[Tensor], Tensor]) -> Callable[[Rule], Rule]:
    return lambda rule: replace(rule, map=Spoilt(rule, ending, fault))


def halves_swapped(rule: Rule) -> Rule:
    is_merge = rule.mcore[0].key.endswith("eh_proj.weight")
    return replace(rule, map=Then((rule.map, SwapHalves()))) if is_merge else rule


def one_forgotten(rule: Rule) -> Rule:
    if not isinstance(rule.map, Computed):
        return rule
    return spoiling("out_norm.weight", fault=lambda value: value + 1)(rule)


def experts_permuted(rule: Rule) -> Rule:
    """Swap the first matrices of the first two experts."""

    def other(piece: Piece) -> Piece:
        if not piece.key.endswith("experts.linear_fc1.weight") or not piece.offset or piece.offset[0] > 1:
            return piece
        return replace(piece, offset=(1 - piece.offset[0], *piece.offset[1:]))

    return replace(rule, mcore=tuple(map(other, rule.mcore)))


def gate_and_up_exchanged(rule: Rule) -> Rule:
    return replace(rule, hf=rule.hf[::-1]) if rule.mcore[0].key.endswith("mlp.linear_fc1.weight") else rule


def number_changed(args: Namespace) -> None:
    if args.rotary_percent == 0.25:
        args.rotary_percent = 0.5
    else:
        args.moe_router_topk_scaling_factor = 1.5


DELTA = {
    "heads permuted": spoiling("in_proj.weight.z", fault=lambda value: value.roll(8, 0)),
    "a one forgotten": one_forgotten,
    "a convolution reversed": spoiling("conv1d.weight.value", fault=lambda value: value.flip(-1)),
    "beta for alpha": spoiling("in_proj.weight.beta", fault=lambda value: -value),
}
MAMBA = {
    "heads permuted": spoiling("mixer.in_proj.weight.x", fault=lambda value: value.roll(8, 0)),
    "groups permuted": spoiling("mixer.in_proj.weight.B", fault=lambda value: value.roll(8, 0)),
    "a norm forgotten": spoiling("mixer.norm.weight", fault=torch.ones_like),
    "a convolution reversed": spoiling("conv1d.weight.x", fault=lambda value: value.flip(-1)),
    "D for A": spoiling("mixer.D", fault=lambda value: -value.exp()),
}
EXPERTS = {"experts permuted": experts_permuted}
PLANTED: dict[str, dict[str, Callable[[Rule], Rule]]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": {**DELTA, "gate and up exchanged": gate_and_up_exchanged},
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "nemotron_h": {**MAMBA, **EXPERTS},
}
"""Faults in rules that both directions share, so that only logits show them."""
ALONE = {"a number of the config": None, "halves swapped": halves_swapped}
CASES = [(name, fault) for name in FAMILIES for fault in (*PLANTED[name], *ALONE)]


@pytest.mark.parametrize(("name", "fault"), tiered(CASES, CASES[::24]))
def test_a_planted_fault_is_seen(
    name: str,
    fault: str,
    judged: AllJudged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant = {**PLANTED[name], **ALONE}[fault]
    rules = Family.all_rules

    def faulty(family: Family, config: HFConfig, layout: Layout) -> list[Rule]:
        return [plant(rule) if plant else rule for rule in rules(family, config, layout)]

    def arguments(model: HFModel) -> Namespace:
        args = megatron_arguments(model)
        number_changed(args)
        return args

    if plant is None:
        monkeypatch.setattr(import_hf, "megatron_arguments", arguments)
    monkeypatch.setattr(Family, "all_rules", faulty)
    hf_to_mcore(judged[name, False].folder, tmp_path / "mcore", QUIET)
    ours = megatron_logits(tmp_path / "mcore", PROMPT)
    moved = partial(rounding, tmp_path / "mcore", PROMPT, ours)
    checks = compare(judged[name, False].logits, ours, rounding=moved)
    shown = {"depth 1 logits"} if fault == "halves swapped" else {"trunk logits", "depth 1 logits"}
    seen = {check.split(",")[0] for check in failed(checks)}
    assert shown <= seen
    assert ("trunk logits" in seen) == ("trunk logits" in shown)


# --- MTP layers in plain code -----------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x_SND: Tensor, dims: int) -> Tensor:
    """Rotate the first dims of every head, in halves, with base 10,000."""
    angles = torch.arange(len(x_SND))[:, None] / 10000 ** (torch.arange(0, dims, 2) / dims)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x_SND.split([dims // 2, dims // 2, x_SND.size(-1) - dims], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


def attended(query_SND: Tensor, key_SGD: Tensor, value_SGD: Tensor) -> Tensor:
    shared = query_SND.size(1) // key_SGD.size(1)
    key_SND, value_SND = (each.repeat_interleave(shared, dim=1) for each in (key_SGD, value_SGD))
    scores = torch.einsum("snd,tnd->nst", query_SND, key_SND) / query_SND.size(-1) ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
    return torch.einsum("nst,tnd->snd", scores.softmax(-1), value_SND)


def chosen(x_SH: Tensor, weights_SE: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return the weighted sum of experts; unselected ones have weight 0."""
    return sum((weights_SE[:, [index]] * expert(index, x_SH) for index in range(weights_SE.size(1))), torch.zeros(()))


def among_best(scores_SE: Tensor, by_SE: Tensor) -> Tensor:
    """Return the normalized scores of the two experts with the largest `by`; 0 for the others."""
    best = by_SE.topk(2, dim=-1).indices
    kept = torch.zeros_like(scores_SE).scatter(-1, best, scores_SE.gather(-1, best))
    return kept / kept.sum(-1, keepdim=True)


def qwen_layer(t: Tensors, x_SH: Tensor) -> Tensor:
    """Gated attention with a quarter of every head rotated, then an MLP, or experts and a gated shared expert."""
    own = {name.removeprefix("mtp.layers.0."): value for name, value in t.items()}
    normed = norm(x_SH, 1 + own["input_layernorm.weight"], 1e-6)
    query, key, value = (linear(normed, own[f"self_attn.{part}_proj.weight"]) for part in "qkv")
    query, gate = query.unflatten(-1, (4, 2, 16)).unbind(-2)
    query = norm(query, 1 + own["self_attn.q_norm.weight"], 1e-6)
    key = norm(key.unflatten(-1, (2, 16)), 1 + own["self_attn.k_norm.weight"], 1e-6)
    out = attended(rotated(query, 4), rotated(key, 4), value.unflatten(-1, (2, 16))) * gate.sigmoid()
    x_SH = x_SH + linear(out.flatten(1), own["self_attn.o_proj.weight"])
    normed = norm(x_SH, 1 + own["post_attention_layernorm.weight"], 1e-6)

    def swiglu(module: str, y: Tensor) -> Tensor:
        gated = silu(linear(y, own[f"{module}.gate_proj.weight"])) * linear(y, own[f"{module}.up_proj.weight"])
        return linear(gated, own[f"{module}.down_proj.weight"])

    if "mlp.gate.weight" not in own:
        return x_SH + swiglu("mlp", normed)
    scores_SE = linear(normed, own["mlp.gate.weight"]).softmax(-1)
    routed = chosen(normed, among_best(scores_SE, scores_SE), lambda index, y: swiglu(f"mlp.experts.{index}", y))
    shared = linear(normed, own["mlp.shared_expert_gate.weight"]).sigmoid() * swiglu("mlp.shared_expert", normed)
    return x_SH + routed + shared


def nemotron_layers(t: Tensors, x_SH: Tensor, depth: int) -> Tensor:
    """Attention without positions, then squared-ReLU experts selected by sigmoid scores."""
    of_attention, of_experts = (f"mtp.layers.{2 * depth + half}." for half in (0, 1))
    normed = norm(x_SH, t[f"{of_attention}norm.weight"], 1e-5)
    parts = (linear(normed, t[f"{of_attention}mixer.{part}_proj.weight"]).unflatten(-1, (-1, 16)) for part in "qkv")
    x_SH = x_SH + linear(attended(*parts).flatten(1), t[f"{of_attention}mixer.o_proj.weight"])
    normed = norm(x_SH, t[f"{of_experts}norm.weight"], 1e-5)

    def squared(module: str, y: Tensor) -> Tensor:
        up = linear(y, t[f"{of_experts}mixer.{module}.up_proj.weight"])
        return linear(up.relu().square(), t[f"{of_experts}mixer.{module}.down_proj.weight"])

    scores_SE = linear(normed, t[f"{of_experts}mixer.gate.weight"]).sigmoid()
    weights_SE = among_best(scores_SE, scores_SE + t[f"{of_experts}mixer.gate.e_score_correction_bias"])
    return (
        x_SH + chosen(normed, weights_SE, lambda i, y: squared(f"experts.{i}", y)) + squared("shared_experts", normed)
    )


def plain_depths(name: str, t: Tensors, state_SH: Tensor, tokens_S: Tensor, depths: int) -> list[Tensor]:
    """Return logits of every depth: [norm of the next token's embedding | norm of the state] projected, layers, norm,
    head.
    """
    qwen, found = name != "nemotron_h", []
    words = t["model.embed_tokens.weight" if qwen else "backbone.embeddings.weight"]
    for depth in range(depths):
        first, last = f"mtp.layers.{2 * depth}.", f"mtp.layers.{2 * depth + 1}."
        of_words, of_state, join, final = (
            ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
            if qwen
            else (f"{first}enorm", f"{first}hnorm", f"{first}eh_proj", f"{last}final_layernorm")
        )
        one, eps = (1, 1e-6) if qwen else (0, 1e-5)
        word_SH = words[tokens_S[depth + 1 : depth + 1 + len(state_SH)]]
        halves = norm(word_SH, one + t[f"{of_words}.weight"], eps), norm(state_SH, one + t[f"{of_state}.weight"], eps)
        x_SH = linear(torch.cat(halves, dim=-1), t[f"{join}.weight"])
        x_SH = qwen_layer(t, x_SH) if qwen else nemotron_layers(t, x_SH, depth)
        state_SH = norm(x_SH, one + t[f"{final}.weight"], eps)
        found.append(linear(state_SH, t["lm_head.weight"]))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_depths_are_those_that_engines_compute(name: str, judged: AllJudged, tmp_path: Path) -> None:
    """Compared with vLLM's modules for these families, from transformers' trunk states, in float64."""
    from transformers import AutoModelForCausalLM

    folder = judged[name, False].folder
    prompt = Prompt.of(random_tokens(HFConfig.read(folder), 24, 4))
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    ours = megatron_logits(tmp_path / "mcore", prompt)
    with torch.no_grad():
        config, plain = reference_forms.config_of(folder)[1], {"dtype": torch.float32, "attn_implementation": "eager"}
        trunk = AutoModelForCausalLM.from_pretrained(folder, config=config, **plain).get_decoder()
        length = prompt.tokens_BS.size(1) - FAMILIES[name]
        state_SH = trunk(prompt.tokens_BS, use_cache=False).last_hidden_state[0, :length].double()
    tensors = {key: value.double() for key, value in read(folder).items()}
    assert state_SH.size(1) == HIDDEN
    for number, plain_SV in enumerate(
        plain_depths(name, tensors, state_SH, prompt.tokens_BS[0], FAMILIES[name]), start=1
    ):
        ours_SV = ours[f"depth {number}"][: len(plain_SV), : plain_SV.size(1)]
        assert (ours_SV - plain_SV).abs().max() < 1e-4 * plain_SV.abs().max()


# --- MTP layers on disk -----------------------------------------------------------------------------------------------

DENSE = {"layers_block_type": ["mamba", "mlp", "full_attention", "mlp"]}
ATTACHED: list[tuple[str, dict[str, Any], int, str]] = [
    ("qwen3_next", {}, 1, "GEGEGE*E/*E"),
    ("qwen3_5_text", {"full_attention_interval": 2}, 1, "G-*-G-*-/*-"),
    ("nemotron_h", {"mtp_layers_block_type": ["full_attention", "moe"]}, 2, "ME*/*E/*E"),
    ("nemotron_h", DENSE, 2, "M-*-/*-/*-"),
]


@pytest.mark.parametrize("init", tiered(["random", "last-layer"], ("random",)))
@pytest.mark.parametrize(("name", "changes", "depths", "pattern"), tiered(ATTACHED, ATTACHED[2:3]))
def test_attached_depths_are_exported_and_proved(
    name: str, changes: dict[str, Any], depths: int, pattern: str, init: str, tmp_path: Path
) -> None:
    source = make(tmp_path / "hf", name, 0, changes=changes)
    (source / "tokenizer.json").unlink()  # it is not a tokenizer
    mcore, new, back = (str(tmp_path / part) for part in ("mcore", "new", "back"))
    assert main(["hf-to-mcore", str(source), mcore]) == 0
    assert main(["attach-mtp", mcore, new, "--mtp-num-layers", str(depths), "--mtp-init", init]) == 0
    assert DistReader(Path(new)).common()["args"].hybrid_layer_pattern == pattern
    assert main(["mcore-to-hf", new, back]) == 0
    keys = json.loads((tmp_path / "back/config.json").read_text())
    if name == "nemotron_h":
        assert (keys["num_nextn_predict_layers"], keys["mtp_hybrid_override_pattern"]) == (
            depths,
            pattern.split("/")[1],
        )
    there, again = read(source), read(tmp_path / "back")
    assert [key for key in there if not torch.equal(there[key], again[key])] == []
    assert any(key.startswith("mtp.") for key in again)
    assert failed(verify(tmp_path / "back", tmp_path / "new")) == set()


# --- the remaining difference is rounding -----------------------------------------------------------------------------


@contextmanager
def in_float64() -> Iterator[None]:
    """Keep modules that always compute in float32 from downcasting float64."""
    to_float, to = Tensor.float, Tensor.to

    def kept(values: Tensor, *given: Any, **named: Any) -> Tensor:
        if values.dtype == torch.float64:
            given = tuple(torch.float64 if one is torch.float32 else one for one in given)
            named |= {"dtype": torch.float64} if named.get("dtype") is torch.float32 else {}
        return to(values, *given, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "float", lambda values: values if values.dtype == torch.float64 else to_float(values))
        patched.setattr(Tensor, "to", kept)
        yield


def trunk_logits(source: Path, mcore: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits of Megatron's and transformers' model, computed in this dtype."""
    from transformers import AutoModelForCausalLM

    model = load_model(mcore)
    place(model, PROMPT.positions_S.tolist())
    for module in model.to(dtype).modules():
        if hasattr(module, "config") and hasattr(module.config, "params_dtype"):
            module.config.params_dtype = dtype
    settings: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **settings).eval()
    with torch.no_grad():
        theirs_SV = reference(PROMPT.tokens_BS, position_ids=PROMPT.positions_S.unsqueeze(0)).logits[0]
        return logits_of(model, PROMPT)["trunk"][:, : theirs_SV.size(1)].double(), theirs_SV.double()


@pytest.mark.matrix
def test_qwen3_next_differences_are_only_float32_rounding(tmp_path: Path) -> None:
    """The model with the worst float32 rounding of 34: each side differs more from itself in float64 than from the
    other.
    """
    source = make(tmp_path / "hf", "qwen3_next", 1, seed=17)
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    ours, theirs = trunk_logits(source, tmp_path / "mcore", torch.float32)
    with in_float64():
        ours_in_64, theirs_in_64 = trunk_logits(source, tmp_path / "mcore", torch.float64)
    largest = theirs_in_64.abs().max()
    between, own, reference, exact = (
        float((one - other).abs().max() / largest)
        for one, other in ((ours, theirs), (ours, ours_in_64), (theirs, theirs_in_64), (ours_in_64, theirs_in_64))
    )
    assert exact < 1e-5
    assert min(own, reference) > 1e-4
    assert between < own
