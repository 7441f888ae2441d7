"""The output layer, shared by the trunk and all MTP layers, with what a loss needs to know about it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import distributed_data_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.model.vocabulary import Vocabulary, mask_padding_, tokens_of_slice


@dataclass(frozen=True)
class Head:
    """Output layer shared by the trunk and all MTP layers; this rank's slice of the vocabulary.

    Attributes:
        project: hidden states [S, B, H] to logits [S, B, V / TP], in new memory that the caller may overwrite.
        cross_entropy: labels [B, S] and logits [S, B, V / TP] to losses [B, S]; vocabulary padding has probability 0,
            and the logits are overwritten.
        tp_group: ranks that hold the other slices.
        weight: [V / TP, H], detached if the caller must not train it.
        whole: gathers hidden states for the tensor-parallel region: all positions, with gradients summed over ranks.
        logit_scale: factor of all logits.
        draft_vocabulary: the tokens that the MTP layers may draft; None for all.
        vocab_size: number of tokens of all slices; further rows are padding. None if every row is a token.
        own_rows: a drafter's own output rows of this slice; None if it drafts with the trunk's.
        bias_rows: [V / TP, R] or fewer, additional columns of the rows that draft; states then are [S, B, H + R].
        takes_slices: whether drafter states are split by sequence parallelism like the trunk's.
        candidates: number of tokens with the largest logits without bias, among which the logits with bias choose; None
            to choose among all.
    """

    project: Callable[[Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    tp_group: ProcessGroup
    weight: Tensor
    whole: Callable[[Tensor], Tensor]
    logit_scale: float = 1.0
    draft_vocabulary: DraftVocabulary | None = None
    vocab_size: int | None = None
    own_rows: Tensor | None = None
    bias_rows: Tensor | None = None
    takes_slices: bool = True
    candidates: int | None = None

    def whole_drafts(self, hidden_SBX: Tensor) -> Tensor:
        """Like `whole`, for the states of the drafter."""
        return (
            self.whole(hidden_SBX)
            if self.takes_slices
            else copy_to_tensor_model_parallel_region(hidden_SBX, group=self.tp_group)
        )

    @property
    def draft_weight(self) -> Tensor:
        """Rows that the MTP layers draft with, [V / TP, H] or fewer."""
        return self.taught_weight if self.own_rows is None else self.own_rows

    @property
    def taught_weight(self) -> Tensor:
        """The trunk's rows of the draft vocabulary."""
        drafted = self.draft_vocabulary
        return self.weight if drafted is None else self.weight.index_select(0, drafted.rows_K)

    def vocabulary(self, drafts: bool = False) -> Vocabulary:
        """Return the vocabulary of the rows; with `drafts`, that of the rows that the MTP layers draft with."""
        drafted = self.draft_vocabulary if drafts else None
        rows = len(self.weight) if drafted is None else drafted.rows_K.numel()
        return Vocabulary(rows, self.tp_group, self.logit_scale, drafted, self.vocab_size)


def head_of(
    model: LanguageModule,
    owner: Any,
    gathers: bool | None = None,
    detached: bool = False,
    draft_vocabulary: DraftVocabulary | None = None,
    vocab_size: int | None = None,
) -> Head:
    """Return the output layer of a model on its last stage, as losses need it.

    Args:
        model: Megatron's model, or a subclass.
        owner: the module that owns the weight.
        gathers: whether `project` gathers the slices of the vocabulary; None for the model's own choice.
        detached: whether the output layer is not trained.
        draft_vocabulary, vocab_size: see `Head`.
    """
    _await_gathered(owner)
    loss_of_rows = model.compute_language_model_loss
    weight, group = owner.weight.detach() if detached else owner.weight, model.pg_collection.tp

    def scaled(logits: Tensor) -> Tensor:
        made: Tensor = model._scale_logits(logits) if hasattr(model, "_scale_logits") else logits  # 0.16 has no muP
        return made

    def project(hidden_SBH: Tensor) -> Tensor:
        logits_SBV, _ = model.output_layer(hidden_SBH, weight=weight, runtime_gather_output=gathers)
        return scaled(logits_SBV)

    def cross_entropy(labels_BS: Tensor, logits_SBV: Tensor) -> Tensor:
        tokens = tokens_of_slice(vocab_size, logits_SBV.size(-1), group.rank())
        losses_BS: Tensor = loss_of_rows(labels_BS, mask_padding_(logits_SBV, tokens))
        return losses_BS

    def whole(hidden_SBH: Tensor) -> Tensor:
        spread = (
            gather_from_sequence_parallel_region
            if model.config.sequence_parallel
            else copy_to_tensor_model_parallel_region
        )
        whole_SBH: Tensor = spread(hidden_SBH, group=group)
        return whole_SBH

    return Head(
        project=project,
        cross_entropy=cross_entropy,
        tp_group=group,
        weight=weight,
        whole=whole,
        logit_scale=scaled(torch.ones(())).item(),
        draft_vocabulary=draft_vocabulary,
        vocab_size=vocab_size,
    )


def _await_gathered(module: torch.nn.Module) -> None:
    """Wait for the module's weights, as DDP does before its forward with `--overlap-param-gather`.

    The losses in chunks read the head's weight without a forward of the module that owns it.
    """
    for hook in module._forward_pre_hooks.values():
        if inspect.getmodule(hook) is distributed_data_parallel:
            hook(module, ())
