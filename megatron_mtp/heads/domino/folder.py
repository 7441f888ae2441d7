"""Hugging Face format of a Domino drafter: that of DFlash, with `prefix_gru.*` and `embed_proj.*`."""

from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar, override

from megatron_mtp.checkpoint.convert.drafter_codec import BlockCodec, TokenOrder
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.kinds import DrafterKind

PLAIN = "pure_draft_prefix_len"
"""Number of drafts without a bias: one in every published folder."""


class DominoFolder(BlockCodec):
    """Domino, whose rows draft the next token (`shift_label`) or the one at their own position; no draft vocabulary."""

    own_forms: ClassVar[dict[str, Any]] = {"projector_type": "domino", PLAIN: 1}
    whole_numbers = (*BlockCodec.whole_numbers, "emb_dim", "gru_hidden_dim", PLAIN)

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        return super().keys(kind) | {"emb_dim": kind.own["drafter_markov_rank"]}

    @override
    def inner(self, kind: HeadSpec) -> dict[str, Any]:
        rank, size = kind.own["drafter_markov_rank"], kind.own["drafter_gru_size"]
        own = {"emb_dim": rank, "gru_hidden_dim": size, "shift_label": not kind.idle_rows}
        return {**super().inner(kind), **self.own_forms, **own}

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        size, rank = kind.own["drafter_gru_size"], kind.own["drafter_markov_rank"]
        hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
        return [
            *super().rules(kind, sizes, layer, rows),
            rename("prefix_gru.weight_ih_l0", f"{DRAFTER}gru_input", (3 * size, hidden)),
            rename("prefix_gru.weight_hh_l0", f"{DRAFTER}gru_state", (3 * size, size)),
            rename("embed_proj.0.weight", f"{DRAFTER}bias_input", (rank, hidden + size)),
            rename("embed_proj.2.weight", f"{DRAFTER}bias_output", (vocabulary, rank)),
        ]

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        if type(keys.get("shift_label")) is not bool:
            raise ValueError(
                f"{path / CONFIG} lacks shift_label, by which rows draft the next token or their own; add it "
                "as the drafter was trained."
            )
        made = super().sizes(path, row, {**keys, "sample_from_anchor": keys["shift_label"]}, args)
        return {**made, "drafter_markov_rank": keys["emb_dim"], "drafter_gru_size": keys["gru_hidden_dim"]}


FOLDER = DominoFolder()
