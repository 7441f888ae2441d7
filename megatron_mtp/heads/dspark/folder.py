"""Hugging Face format of a DSpark drafter: that of DFlash, with `markov_head.*` and `confidence_head.*`."""

from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar, override

from megatron_mtp.checkpoint.convert.drafter_codec import BlockCodec, TokenOrder, by_token
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.kinds import DrafterKind


class DSparkFolder(BlockCodec):
    """DSpark: a bias by the previous token and a confidence; every row of its block drafts."""

    own_forms: ClassVar[dict[str, Any]] = {"projector_type": "dspark"}
    whole_numbers = (*BlockCodec.whole_numbers, "markov_rank")

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        return {
            **super().keys(kind),
            **self.inner(kind),
            **{"markov_rank": kind.own["drafter_markov_rank"], "markov_head_type": "vanilla"},
            **{"enable_confidence_head": True, "confidence_head_with_markov": True},
            **({"sample_from_anchor": False} if kind.idle_rows else {}),
        }

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        hidden, rank, drafted = sizes["hidden_size"], kind.own["drafter_markov_rank"], len(rows.order_N)
        return [
            *super().rules(kind, sizes, layer, rows),
            rename("markov_head.markov_w1.weight", f"{DRAFTER}markov_w1", (sizes["vocab_size"], rank)),
            by_token("markov_head.markov_w2.weight", f"{DRAFTER}markov_w2", (drafted, rank), rows),
            rename("confidence_head.proj.weight", f"{DRAFTER}confidence_weight", (1, hidden + rank)),
            rename("confidence_head.proj.bias", f"{DRAFTER}confidence_bias", (1,)),
        ]

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        return {**super().sizes(path, row, keys, args), "drafter_markov_rank": keys["markov_rank"]}


FOLDER = DSparkFolder()
