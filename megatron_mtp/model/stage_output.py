"""What the last pipeline stage gives the losses: hidden states of the trunk and of every draft head, and the heads."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.model.head import Head


@dataclass(frozen=True)
class Drafted:
    """Output of a draft head.

    Attributes:
        hidden: states of depth 1 .. D.
        head: the output head as it drafts with it, detached where it must not train it.
        batch: its depths.
        confidence_DSB: logits that the drafts of a depth are accepted, of a drafter that has them; else None.
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
        head: the output head.
        drafted: of every draft head; empty where the call had no batches.
        batches: the call's `output_processor_context`: one for every draft head, and one without MTP layers for a trunk
            alone. All have the trunk's labels.
    """

    hidden_SBH: Tensor
    head: Head
    drafted: Sequence[Drafted] = ()
    batches: Sequence[DepthBatch] | None = None
