"""The training objective: what the last stage makes of the trunk's and the depths' hidden states."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.losses import Loss
from megatron_mtp.losses.combine import LossSum, sum_depths, sum_losses
from megatron_mtp.losses.cross_entropy import cross_entropy
from megatron_mtp.model.sharing import Head
from megatron_mtp.training.acceptance import AcceptanceCounts, count_acceptance


@dataclass(frozen=True)
class ObjectiveOutput:
    """The model's output on the last stage.

    Attributes:
        main: the trunk's loss sum.
        depths: of depth 1 .. D.
        acceptance: counts, where they were asked for.
    """

    main: LossSum
    depths: list[LossSum]
    acceptance: AcceptanceCounts | None


@dataclass(frozen=True)
class NextTokensObjective:
    """Cross-entropy of the trunk, a loss of every depth, and acceptance where it is to be measured.

    Attributes:
        depth_loss: of every depth.
        acceptance_group: the context-parallel ranks that measure acceptance together; None where nobody measures it.
    """

    depth_loss: Loss
    acceptance_group: ProcessGroup | None = None

    def __call__(
        self, hidden_SBH: Tensor, depth_hidden: list[Tensor], head: Head, depth_head: Head, batch: DepthBatch
    ) -> ObjectiveOutput:
        """Called by the model; `depth_head` is the head as the depths see it, detached where they must not train it."""
        depth_losses = [
            self.depth_loss(state_SBH, labels_BS, depth_head)
            for state_SBH, labels_BS in zip(depth_hidden, batch.labels_DBS, strict=True)
        ]
        return ObjectiveOutput(
            main=sum_losses(
                cross_entropy(hidden_SBH, batch.labels_BS, head), batch.loss_mask_BS, batch.whole_tokens[0]
            ),
            depths=sum_depths(depth_losses, batch),
            acceptance=self._acceptance(hidden_SBH, depth_hidden, head, batch),
        )

    def _acceptance(
        self, hidden_SBH: Tensor, depth_hidden: list[Tensor], head: Head, batch: DepthBatch
    ) -> AcceptanceCounts | None:
        if self.acceptance_group is None or not depth_hidden:
            return None
        return count_acceptance(hidden_SBH, depth_hidden, head, batch, self.acceptance_group)
