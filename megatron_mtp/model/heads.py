"""The draft heads of a model: a list, MTP layers first, and a drafter in their place or after them.

Whatever a head is, it drafts from the trunk's output, it has an output head, and a checkpoint may lack its layers. One
pipeline stage holds all of them; the others know which layers of the trunk they read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_mtp.model.around_layers import set_quantization
from megatron_mtp.model.initialize import fill_absent_layers
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules
from megatron_mtp.model.mtp_block import MultiTokenPredictionBlock
from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.spec.registry import Imported

if TYPE_CHECKING:
    from megatron_mtp.model.drafter import DrafterBlock

BLOCKS: "Imported[type[DrafterBlock]]" = Imported({row.name: row.block for row in DRAFTERS.values()})
"""Modules of drafters by kind."""

OWN_HEAD = "layers.0.head"
"""A drafter's rows of the draft vocabulary, within its block."""


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
        self.plans, self._lacks_vocabulary = tuple(plans), lacks_vocabulary
        self.blocks: list[MultiTokenPredictionBlock] = []

    def build(self, model: Any, draft_vocabulary: Tensor | None) -> None:
        """Give the stage the modules."""
        for plan in self.plans:
            block = plan.block(model.config, plan.layer, model.pg_collection, model.vp_stage, draft_vocabulary)
            block.absent = tuple(self._lacking(plan))
            set_quantization(block, model.config)
            setattr(model, plan.name, block)
            self.blocks.append(block)

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the trunk's layers whose states some head reads."""
        return tuple(sorted({number for plan in self.plans for number in plan.reads}))

    # --- what a checkpoint lacks -------------------------------------------------------------------------------------

    def _lacking(self, plan: HeadPlan) -> Iterator[str]:
        """Beginnings of the names of what the checkpoint that is about to be loaded lacks of a head."""
        yield from (f"layers.{index}." for index in plan.absent)
        if 0 in plan.absent or self._lacks_vocabulary:
            yield "draft_vocabulary"
        if self._lacks_vocabulary:  # then a drafter has no rows of its own either
            yield OWN_HEAD

    def filled(
        self, loaded: Mapping[str, Any], own_state: Callable[[], dict[str, Any]]
    ) -> tuple[Mapping[str, Any], list[MultiTokenPredictionBlock]]:
        """A stage's state with what the checkpoint lacks, and the blocks whose rows of the output head are new.

        Afterwards nothing is lacking any more.

        Args:
            loaded: as read.
            own_state: gives it as initialized.
        """
        new = list[MultiTokenPredictionBlock]()
        if not any(block.absent for block in self.blocks):
            return loaded, new
        own, filled, lacking = own_state(), dict(loaded), list[str]()
        for plan, block in zip(self.plans, self.blocks, strict=True):
            if not block.absent:
                continue
            filled = fill_absent_layers(filled, own, block, plan.absent, plan.init, plan.seed, plan.name)
            lacking += (f"{plan.name}.{beginning}" for beginning in block.absent)
            if OWN_HEAD.startswith(block.absent):
                new.append(block)
            block.absent = ()
        return {name: value for name, value in own.items() if name.startswith(tuple(lacking))} | filled, new
