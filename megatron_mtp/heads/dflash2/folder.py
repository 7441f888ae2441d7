"""Hugging Face format of a DFlash2 drafter: that of DFlash, with convolutions and `candidate_selector.*`."""

from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar, override

from megatron_mtp.checkpoint.convert.drafter_codec import BlockCodec, TokenOrder
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.heads.dflash2.row import CANDIDATES, CHANNELS_OF_A_KERNEL, TAPS
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.kinds import DrafterKind


class DFlash2Folder(BlockCodec):
    """DFlash2: convolutions along the block and a choice among likely tokens; no draft vocabulary."""

    own_forms: ClassVar[dict[str, Any]] = {
        "conv_kernel_size": TAPS,
        "conv_group_size": CHANNELS_OF_A_KERNEL,
        "selector_rank": None,
        "selector_top_k": CANDIDATES,
    }
    whole_numbers = (*BlockCodec.whole_numbers, *own_forms)

    @override
    def inner(self, kind: HeadSpec) -> dict[str, Any]:
        own = {"selector_rank": kind.own["drafter_markov_rank"], "block_size": kind.drafts + kind.idle_rows}
        return {**super().inner(kind), **self.own_forms, **own}

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        hidden, rank, vocabulary = sizes["hidden_size"], kind.own["drafter_markov_rank"], sizes["vocab_size"]
        kernels = 2 * TAPS * (hidden // CHANNELS_OF_A_KERNEL), hidden
        rules = super().rules(kind, sizes, layer, rows)
        for number in range(kind.depth):
            for name, part in (("attention_conv", "self_attention"), ("mlp_conv", "mlp")):
                hf, own = f"layers.{number}.{name}.", f"{DRAFTER}layers.{number}.{part}.conv."
                rules.append(rename(f"{hf}base_kernel", f"{own}base_kernel", (2, TAPS, hidden)))
                rules.append(rename(f"{hf}kernel_projection.weight", f"{own}kernel_projection", kernels))
        selector = "candidate_selector."
        return [
            *rules,
            rename(f"{selector}predecessor_codebook", f"{DRAFTER}markov_w1", (vocabulary, rank)),
            rename(f"{selector}successor_codebook", f"{DRAFTER}markov_w2", (vocabulary, rank)),
            rename(f"{selector}hidden_projection.weight", f"{DRAFTER}markov_projection", (rank, hidden)),
        ]

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        return {**super().sizes(path, row, keys, args), "drafter_markov_rank": keys["selector_rank"]}


FOLDER = DFlash2Folder()
