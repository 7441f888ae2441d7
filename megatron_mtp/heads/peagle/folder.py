"""Hugging Face format of a P-EAGLE drafter: that of EAGLE-3 with several layers and `mask_hidden`."""

from argparse import Namespace
from pathlib import Path
from typing import Any, override

from megatron_mtp.checkpoint.convert.drafter_codec import TokenOrder, input_and_output, layer_rules
from megatron_mtp.checkpoint.families.blocks import Place
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.heads.eagle3.folder import NORMS_OF_BOTH, Eagle3Folder
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.kinds import DrafterKind

MASKS = "mask_token_id", "pard_token", "ptd_token_id"
"""Config keys of the mask token, in the order in which vLLM looks them up."""


class PEagleFolder(Eagle3Folder):
    """P-EAGLE, which always has its own output layer; the folder does not store the number of drafts in training."""

    layer_names = ("layers.0.",)
    whole_numbers = (*Eagle3Folder.whole_numbers, "num_hidden_layers")

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        return super().keys(kind) | {"mask_token_id": kind.mask_token}

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        made = input_and_output(sizes, len(kind.layers))
        made.append(rename("mask_hidden", f"{DRAFTER}mask_hidden", (1, 1, len(kind.layers) * sizes["hidden_size"])))
        for number in range(kind.depth):
            place = Place(f"layers.{number}.", f"{DRAFTER}layers.{number}.")
            if number == 0:
                made += layer_rules(place, sizes, kind, NORMS_OF_BOTH, inputs=2)
            else:
                made += layer_rules(place, sizes, kind, {"input_layernorm": "input_layernorm"})
        return made

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        mask = next((keys[name] for name in MASKS if type(keys.get(name)) is int), -1)
        if not 0 <= mask < args.vocab_size:
            raise ValueError(
                f"{path / CONFIG} has no {MASKS[0]} among the {args.vocab_size} tokens of the vocabulary; give a "
                "drafter of this trunk."
            )
        return {"drafter_num_layers": keys["num_hidden_layers"], "drafter_mask_token": mask}

    @override
    def has_unknown_layers(self, keys: dict[str, Any]) -> bool:
        return False


FOLDER = PEagleFolder()
