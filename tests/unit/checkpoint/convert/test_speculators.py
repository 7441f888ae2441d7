"""Folders saved by speculators, attached to a trunk, draft like speculators' own forward pass.

Skipped without the package; with it, every kind that both support is drawn at random and saved by speculators.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from drafter_folders import DRAFTED, WIDTH, make_trunk
from hf_models import HIDDEN, VOCABULARY
from judged_models import QUIET
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter
from megatron_mtp.checkpoint.verify import drafters as judge
from megatron_mtp.checkpoint.verify.drafters import verify_drafter
from megatron_mtp.heads.peagle.reference import PEagleReference
from megatron_mtp.megatron.checkpoint import EMBEDDING
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("megatron")
S, F = "sliding_attention", "full_attention"
BLOCK, MASK, RANK = 4, 7, 6
LONG = 64
"""A window of all positions: in speculators it starts W before the block for all rows, in engines before each row."""
BLOCKS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "dflash, full": ("dflash", [F, F], {}),
    "dflash, windowed": ("dflash", [S, S], {}),
    "dflash, both": ("dflash", [S, F], {}),
    "dflash, both, non-causal": ("dflash", [F, S], {"sliding_window_non_causal": True}),
    "dspark, both": ("dspark", [S, F], {"markov_rank": RANK}),
    "dspark, anchor idle": ("dspark", [S, S], {"markov_rank": RANK, "sample_from_anchor": False}),
    "dflash2, both": ("dflash2", [S, F], {"selector_rank": RANK}),
    "dflash2, both, causal": ("dflash2", [S, F], {"selector_rank": RANK, "sliding_window_non_causal": False}),
}
LAYER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def speculators() -> ModuleType:
    reason = "speculators is not installed; pip install speculators runs its own forward as the judge"
    module: ModuleType = pytest.importorskip("speculators.models", reason=reason)
    return module


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trunk(tmp_path_factory.mktemp("trunk"))[1]


def saved(model: Any, folder: Path, trunk: Path) -> Path:
    """Save the model as speculators does: random weights, the trunk's embedding, lists of the draft tokens."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = 0.2 * torch.randn_like(parameter)
        parameter.data = 1 + noise if "norm" in name else noise
    model.embed_tokens.weight.data = DistReader(trunk).read(EMBEDDING)[:VOCABULARY]
    if model.use_draft_vocab:
        model.t2d = torch.isin(torch.arange(VOCABULARY), torch.tensor(DRAFTED))
        model.d2t = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    model.save_pretrained(folder)
    return folder


Given = tuple[Tensor, ...]


def drafts(
    folder: Path,
    trunk: Path,
    target: Path,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[judge.Reference] = judge.Reference,
) -> tuple[Given, dict[str, Tensor]]:
    """Return the inputs of the plain reference, `part` of its methods, and Megatron's drafts from it."""
    plan_attaching_drafter(trunk, folder).write(target, QUIET)
    given: list[Given] = []
    made = getattr(kind, part)

    def noted(self: judge.Reference, *states: Tensor) -> dict[str, Tensor]:
        given.append(states)
        drafts: dict[str, Tensor] = made(self, *states)
        return drafts

    monkeypatch.setattr(kind, part, noted)
    ours: list[dict[str, Tensor]] = []
    both: Callable[..., Any] = judge.drafts_of_both

    def kept(*arguments: Any) -> Any:
        found = both(*arguments)
        ours.append(found[0])
        return found

    monkeypatch.setattr(judge, "drafts_of_both", kept)
    checks = verify_drafter(folder, target)
    assert [f"{check.name}: {check.figure}" for check in checks if check.made and not check.ok] == []
    return given[0], ours[0]


def by_token(logits_KN: Tensor, model: Any) -> Tensor:
    """Return logits of draft tokens at their ids, zeros elsewhere."""
    tokens_N = torch.arange(VOCABULARY) if model.d2t is None else model.d2t + torch.arange(len(model.d2t))
    return logits_KN.new_zeros(len(logits_KN), VOCABULARY).index_copy_(1, tokens_N, logits_KN)


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_a_block_is_drafted_as_speculators_drafts_it(
    name: str, speculators: ModuleType, trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, types, keys = BLOCKS[name]
    config_class, model_class = CLASSES[kind]
    layers = {"num_hidden_layers": 2, "layer_types": types, "sliding_window": LONG, "use_sliding_window": True}
    layer = Qwen3Config(**LAYER, **layers)
    layer._attn_implementation = "eager"
    drafted = VOCABULARY if kind == "dflash2" else len(DRAFTED)
    own = {
        "draft_vocab_size": drafted,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 3],
    }
    config = getattr(speculators, config_class)(transformer_layer_config=layer, **{**own, **keys})
    model = getattr(speculators, model_class)(config)
    folder = saved(model, tmp_path / "folder", trunk)
    (states_SX, tokens_S, _, head_VH), ours = drafts(folder, trunk, tmp_path / "out", "drafts", monkeypatch)

    context, tokens_K = len(states_SX), tokens_S[len(states_SX) :]
    idle = BLOCK - len(tokens_K)
    length = context + 2 * BLOCK
    if not model.use_draft_vocab:
        model.lm_head.weight.data = head_VH.float()
    states = torch.zeros(1, length, states_SX.size(1))
    states[0, :context] = states_SX
    tokens = torch.zeros(1, length, dtype=torch.long)
    tokens[0, context : context + len(tokens_K)] = tokens_K
    chosen = torch.zeros(1, length)
    chosen[0, context] = 1
    last = torch.zeros(1, length, HIDDEN)
    document = torch.zeros(1, length, dtype=torch.long)
    hidden, logits, *_ = model._backbone_forward(states, tokens, chosen, last, document, max_anchors=1)
    before = torch.cat([tokens_K[:idle], tokens_K])[None]
    if kind == "dspark":
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        features = torch.cat([hidden, model.markov_head.prev_embeddings(before)], dim=-1)
        sure = model.confidence_head(features).flatten()[idle:]
        assert (ours["confidence of drafts"] - sure).abs().max() < 1e-4
    if kind == "dflash2":
        every = torch.arange(VOCABULARY).expand(1, BLOCK, -1)
        logits = model.candidate_selector.score_candidates(logits, hidden, before, every)
    theirs = by_token(logits[0, idle:], model)
    assert (ours["logits of drafts"] - theirs).abs().max() < 1e-4 < theirs.abs().max()


CLASSES = {
    "dflash": ("DFlashSpeculatorConfig", "DFlashDraftModel"),
    "dspark": ("DSparkSpeculatorConfig", "DSparkDraftModel"),
    "dflash2": ("DFlash2SpeculatorConfig", "DFlash2DraftModel"),
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_before", [False, True])
@torch.no_grad()
def test_eagle3_drafts_as_speculators_does(
    window: int | None,
    is_before: bool,
    speculators: ModuleType,
    trunk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = LlamaConfig(**LAYER, num_hidden_layers=1, tie_word_embeddings=False)
    layer._attn_implementation = "eager"
    if window is not None:
        layer.layer_types, layer.sliding_window = [S], window
    own: dict[str, Any] = {"draft_vocab_size": len(DRAFTED), "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    config = speculators.Eagle3SpeculatorConfig(transformer_layer_config=layer, norm_before_residual=is_before, **own)
    model = speculators.Eagle3DraftModel(config)
    folder = saved(model, tmp_path / "folder", trunk)
    (states_SX, next_SH, _), ours = drafts(folder, trunk, tmp_path / "out", "steps", monkeypatch)
    length = len(states_SX)
    model.embed_tokens = torch.nn.Embedding.from_pretrained(next_SH.float())
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, made: logits.append(made[0]))
    tokens, document = torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long)
    model(states_SX[None], tokens, document, ttt_steps=1)
    theirs = by_token(logits[0], model)
    assert (ours["logits of drafts"] - theirs).abs().max() < 1e-4 < theirs.abs().max()
    assert DistReader(tmp_path / "out").common()["args"].drafter_window_size == window


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("is_before", [False, True])
@torch.no_grad()
def test_p_eagle_drafts_as_speculators_trains(
    window: int | None,
    is_before: bool,
    speculators: ModuleType,
    trunk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The masks after one position are rows of its training forward pass, which draws positions at random.

    There a mask sees all masks before it, in engines those in its window; this window has more positions than drafts.
    """
    layer = LlamaConfig(**LAYER, num_hidden_layers=2, tie_word_embeddings=False)
    layer._attn_implementation = "eager"
    if window is not None:
        layer.layer_types, layer.sliding_window = [F, S], window
    own: dict[str, Any] = {"draft_vocab_size": len(DRAFTED), "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    config = speculators.PEagleSpeculatorConfig(
        transformer_layer_config=layer, norm_before_residual=is_before, mask_token_id=MASK, **own
    )
    model = speculators.PEagleDraftModel(config)
    folder = saved(model, tmp_path / "folder", trunk)
    given, ours = drafts(folder, trunk, tmp_path / "out", "drafts", monkeypatch, PEagleReference)
    states_SX, tokens_S = given[:2]
    count, drafted = len(states_SX), len(ours["logits of drafts"])
    states = torch.cat([states_SX, torch.zeros(drafted, states_SX.size(1))])[None]
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    anchors = torch.cat([torch.arange(count + drafted), torch.full((drafted - 1,), count - 1)])
    depths = torch.cat([torch.zeros(count + drafted, dtype=torch.long), torch.arange(1, drafted)])
    monkeypatch.setattr("speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: (anchors, depths))
    document = torch.zeros(1, count + drafted, dtype=torch.long)
    last = torch.zeros(1, count + drafted, HIDDEN)
    shifted = torch.cat([tokens_S[1 : count + drafted], tokens_S[:1]])[None]
    plain = import_module("speculators.losses").resolve_loss_config("kl_div", "eager")
    named: dict[str, Any] = {"verifier_last_hidden_states": last, "num_depths": drafted, "loss_config": plain}
    model(states, shifted, document, **named)
    theirs = by_token(torch.cat([logits[0][count - 1 : count], logits[0][count + drafted :]]), model)
    assert (ours["logits of drafts"] - theirs).abs().max() < 1e-4 < theirs.abs().max()
