"""Folders saved by SpecForge, attached to a trunk, draft like its own forward pass; skipped without the package."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_folders import WIDTH, make_trunk
from hf_models import HIDDEN, VOCABULARY
from judged_models import QUIET
from torch import Tensor
from transformers import Qwen3Config

from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter
from megatron_mtp.checkpoint.verify.drafters import verify_drafter
from megatron_mtp.heads.domino.reference import DominoReference

pytestmark = pytest.mark.usefixtures("megatron")
BLOCK, MASK, RANK, STATE = 4, 7, 6, 10


@pytest.mark.parametrize("shifts", [True, False], ids=["next tokens", "own tokens"])
@torch.no_grad()
def test_domino_drafts_as_specforge_does(shifts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "SpecForge is not installed; pip install specforge runs its own forward as the judge"
    specforge = pytest.importorskip("specforge.modeling.draft.domino", reason=reason, exc_type=ImportError)
    trunk, model = make_trunk(tmp_path)[1], specforge.DominoDraftModel(config_of(shifts))
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = 0.2 * torch.randn_like(parameter)
        parameter.data = 1 + noise if "norm" in name else noise
    model.save_pretrained(tmp_path / "folder")
    plan_attaching_drafter(trunk, tmp_path / "folder").write(tmp_path / "out", QUIET)
    given, made = list[tuple[Tensor, ...]](), DominoReference.drafts

    def noted(self: DominoReference, *states: Tensor) -> Any:
        given.append(states)
        return made(self, *states)

    monkeypatch.setattr(DominoReference, "drafts", noted)
    checks = verify_drafter(tmp_path / "folder", tmp_path / "out")
    assert [check.name for check in checks if check.made and not check.ok] == []
    (states_SX, tokens_S, words_VH, head_VH), count = given[0], len(given[0][0])
    ours = made(DominoReference(tmp_path / "folder"), *given[0])["logits of drafts"]
    rows = torch.cat([tokens_S[count : count + 1], torch.full((BLOCK - 1,), MASK)])
    hidden = model(
        position_ids=torch.arange(count + BLOCK)[None],
        noise_embedding=words_VH[rows][None],
        target_hidden=states_SX[None],
        attention_mask=None,
    )
    before = torch.cat([tokens_S[count:], torch.zeros(BLOCK).to(tokens_S)])[:BLOCK]
    embedded = words_VH[before][None, None]
    base = (hidden @ head_VH.t())[:, None]
    logits = model.apply_logits_head(base, prev_token_embeddings=embedded, hidden_states=hidden[:, None])
    theirs = logits[0, 0, -len(ours) :]
    assert len(ours) == BLOCK - (not shifts)
    assert (ours - theirs).abs().max() < 1e-4 < theirs.abs().max()


def config_of(shifts: bool) -> Qwen3Config:
    """Return a config like SpecForge's."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
    )
    config._attn_implementation = "eager"
    config.block_size, config.num_target_layers, config.emb_dim = BLOCK, 5, RANK
    config.dflash_config = {
        "mask_token_id": MASK,
        "target_layer_ids": [0, 2],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": RANK,
        "gru_hidden_dim": STATE,
        "shift_label": shifts,
    }
    return config
