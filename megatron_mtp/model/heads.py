"""The draft heads of a model: a list, MTP layers first, and a drafter in their place or after them.

Whatever a head is, it drafts from the trunk's output, it has an output head, and a checkpoint may lack its layers. One
pipeline stage holds all of them; the others know which layers of the trunk they read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.drafters import DRAFTERS
from megatron_mtp.model.head import Drafted, Head
from megatron_mtp.model.initialize import fill_absent_layers
from megatron_mtp.model.mtp import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayerSubmodules,
    TrunkOutput,
    set_quantization,
)
from megatron_mtp.registry import Imported

if TYPE_CHECKING:
    from megatron_mtp.model.drafter import DrafterBlock

BLOCKS: "Imported[type[DrafterBlock]]" = Imported({row.name: row.block for row in DRAFTERS.values()})
"""Modules of drafters by kind."""

OWN_HEAD = "layers.0.head"
"""A drafter's rows of the draft vocabulary, within its block."""

Made = tuple[list[Tensor], Tensor | None]
"""What `MultiTokenPredictionBlock.drafts` gives: states, and the logits of their confidence."""


@dataclass(frozen=True)
class HeadPlan:
    """How a stage makes a draft head.

    Attributes:
        name: of its module, a key of `config.HEADS`.
        block: makes it, from the arguments of `MultiTokenPredictionBlock`.
        layer: the spec of its layers.
        reads: numbers of the trunk's layers whose states it reads, from 1.
        absent: its layers that the checkpoint which is about to be loaded lacks.
        init, seed: how these are made (`initialize.py`).
    """

    name: str
    block: Callable[..., MultiTokenPredictionBlock]
    layer: MultiTokenPredictionLayerSubmodules
    reads: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    init: str = "random"
    seed: int = 0


class DraftHeads:
    """The heads of a model, as one of its stages has them.

    Args:
        plans: of every head.
        lacks_vocabulary: whether the checkpoint that is about to be loaded has no list of drafted tokens.

    Attributes:
        blocks: the modules, on the stage that holds them.
    """

    def __init__(self, plans: Sequence[HeadPlan], lacks_vocabulary: bool) -> None:
        self.plans, self.lacks_vocabulary = tuple(plans), lacks_vocabulary
        self.blocks: list[MultiTokenPredictionBlock] = []

    def build(self, model: Any, draft_vocabulary: Tensor | None) -> None:
        """Give the stage the modules."""
        for plan in self.plans:
            block = plan.block(model.config, plan.layer, model.pg_collection, model.vp_stage, draft_vocabulary)
            set_quantization(block, model.config)
            setattr(model, plan.name, block)
            self.blocks.append(block)

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the trunk's layers whose states some head reads."""
        return tuple(sorted({number for plan in self.plans for number in plan.reads}))

    def drafts(self, trunk: TrunkOutput, batches: Sequence[DepthBatch]) -> list[Made]:
        """What every head drafts in a microbatch."""
        return [block.drafts(trunk, batch) for block, batch in zip(self.blocks, batches, strict=True)]

    def outputs(
        self, made: Sequence[Made], batches: Sequence[DepthBatch], head: Callable[[bool], Head]
    ) -> list[Drafted]:
        """The same with each head's output head, which `head` makes of whether it is detached."""
        return [
            Drafted(states, block.head_of(head(block.is_apart)), batch, confidence_DSB)
            for block, batch, (states, confidence_DSB) in zip(self.blocks, batches, made, strict=True)
        ]

    # --- what a checkpoint lacks -------------------------------------------------------------------------------------

    def lacking(self) -> tuple[str, ...]:
        """Beginnings of the names of what the checkpoint that is about to be loaded lacks."""
        return tuple(self._lacking())

    def _lacking(self) -> Iterator[str]:
        for plan in self.plans:
            yield from (f"{plan.name}.layers.{index}." for index in plan.absent)
            if 0 in plan.absent or self.lacks_vocabulary:
                yield f"{plan.name}.draft_vocabulary"
            if self.lacks_vocabulary:  # then a drafter has no rows of its own either
                yield f"{plan.name}.{OWN_HEAD}"

    def filled(
        self, loaded: Mapping[str, Any], own_state: Callable[[], dict[str, Any]]
    ) -> tuple[Mapping[str, Any], list[MultiTokenPredictionBlock]]:
        """A stage's state with what the checkpoint lacks, and the blocks whose rows of the output head are new.

        Args:
            loaded: as read.
            own_state: gives it as initialized.
        """
        lacking = self.lacking()
        if not lacking or not self.blocks:
            return loaded, []
        own, filled, new = own_state(), dict(loaded), list[MultiTokenPredictionBlock]()
        for plan, block in zip(self.plans, self.blocks, strict=True):
            filled = fill_absent_layers(filled, own, block, plan.absent, plan.init, plan.seed, plan.name)
            if f"{plan.name}.{OWN_HEAD}".startswith(lacking):
                new.append(block)
        return {name: value for name, value in own.items() if name.startswith(lacking)} | filled, new

    def all_loaded(self) -> None:
        """Note that a checkpoint was loaded: nothing is lacking any more."""
        self.plans = tuple(replace(plan, absent=()) for plan in self.plans)
        self.lacks_vocabulary = False
