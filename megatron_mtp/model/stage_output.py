"""Output of the last pipeline stage for the losses: hidden states of trunk and draft heads, and output layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.model.head import Head


@dataclass(frozen=True)
class Drafted:
    """Output of a draft head.

    Attributes:
        hidden: states of depths 1 .. D.
        head: the output layer to draft with, detached if this head must not train it.
        batch: its batch.
        confidence_DSB: logits of each depth's drafts being accepted, for drafters that have them; otherwise None.
    """

    hidden: list[Tensor]
    head: Head
    batch: DepthBatch
    confidence_DSB: Tensor | None = None


@dataclass(frozen=True)
class StageOutput:
    """Output of the last stage.

    Attributes:
        hidden_SBH: the trunk's hidden states after its final norm.
        head: the output layer.
        drafted: output of every draft head; empty if the call had no batches.
        batches: the call's `output_processor_context`: one for every draft head, or one without MTP layers for a trunk
            alone. All have the trunk's labels.
    """

    hidden_SBH: Tensor
    head: Head
    drafted: Sequence[Drafted] = ()
    batches: Sequence[DepthBatch] | None = None
