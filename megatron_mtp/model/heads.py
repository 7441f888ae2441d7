"""The draft heads of a model: MTP layers first, then a drafter instead of them or alongside them.

Every draft head drafts from the trunk's output, has an output layer, and may be missing from a checkpoint. One pipeline
stage holds all of them; the other stages know which trunk layers they read.
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
"""Name, within a drafter's block, of its output head for the draft vocabulary."""


@dataclass(frozen=True)
class HeadPlan:
    """How a stage builds a draft head.

    Attributes:
        name: its module name, a key of `config.HEADS`.
        block: creates it, with the arguments of `MultiTokenPredictionBlock`.
        layer: spec of its layers.
        reads: numbers of the trunk layers whose states it reads, from 1.
        absent: its layers that the checkpoint to load lacks.
        init, seed: how to initialize these (`initialize.py`).
    """

    name: str
    block: Callable[..., MultiTokenPredictionBlock]
    layer: MultiTokenPredictionLayerSubmodules
    reads: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    init: str = "random"
    seed: int = 0


class DraftHeads:
    """The draft heads of a model on one of its stages.

    Args:
        plans: plan of every head.
        lacks_vocabulary: whether the checkpoint to load has no draft vocabulary.

    Attributes:
        blocks: the modules, on the stage that holds them.
    """

    def __init__(self, plans: Sequence[HeadPlan], lacks_vocabulary: bool) -> None:
        self.plans, self._lacks_vocabulary = tuple(plans), lacks_vocabulary
        self.blocks: list[MultiTokenPredictionBlock] = []

    def build(self, model: Any, draft_vocabulary: Tensor | None) -> None:
        """Build the modules on this stage."""
        for plan in self.plans:
            block = plan.block(model.config, plan.layer, model.pg_collection, model.vp_stage, draft_vocabulary)
            block.absent = tuple(self._lacking(plan))
            set_quantization(block, model.config)
            setattr(model, plan.name, block)
            self.blocks.append(block)

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the trunk layers whose states any head reads."""
        return tuple(sorted({number for plan in self.plans for number in plan.reads}))

    # --- parts that a checkpoint lacks
    # -----------------------------------------------------------------------------------

    def _lacking(self, plan: HeadPlan) -> Iterator[str]:
        """Return name prefixes of a head's parts that the checkpoint to load does not have."""
        yield from (f"layers.{index}." for index in plan.absent)
        if 0 in plan.absent or self._lacks_vocabulary:
            yield "draft_vocabulary"
        if self._lacks_vocabulary:  # then a drafter also lacks its own output rows
            yield OWN_HEAD

    def filled(
        self, loaded: Mapping[str, Any], own_state: Callable[[], dict[str, Any]]
    ) -> tuple[Mapping[str, Any], list[MultiTokenPredictionBlock]]:
        """Fill in what the checkpoint lacks. Return the stage's state and the blocks whose output rows are new.

        Afterwards nothing is marked as missing.

        Args:
            loaded: state as read.
            own_state: function that returns the initialized state.
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
