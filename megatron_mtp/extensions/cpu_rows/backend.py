"""The backend `cpu_rows`: up to 64 rows in compiled code, for models on a CPU in float32 or bfloat16."""

import logging
from collections.abc import Sequence
from typing import override

import psutil
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor, nn

from megatron_mtp.decoding.backend import Modules, Pass, Stack, Unfit
from megatron_mtp.decoding.cached_attention import Scope
from megatron_mtp.decoding.dense_layer import Multiply
from megatron_mtp.decoding.draft import Draft, StepOutput
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.sequences import Sequences
from megatron_mtp.extensions.cpu_rows.compiled import library
from megatron_mtp.extensions.cpu_rows.few_rows import MOST_ROWS, FewRows, few_rows, greedy_steps, head_of, is_compiled
from megatron_mtp.extensions.cpu_rows.products import product

MOST_OF_FREE_MEMORY = 0.5
"""Largest share of free memory that packed weights may take."""

_logger = logging.getLogger(__name__)


class CpuRows(Modules):
    """Backend with compiled code; arguments and attributes as in `Modules`.

    Attributes:
        few_rows: compiled code of each stack; None for stacks with layers that are not supported.

    Raises:
        Unfit: there is no compiled code, it does not support these weights, or there is no memory for packed weights.
    """

    def __init__(self, model: LanguageModule, scope: Scope, positions: int, head_VH: Tensor | None) -> None:
        weight = model.embedding.word_embeddings.weight
        if not is_compiled(weight) or library(weight.dtype) is None:
            raise Unfit
        if not _has_room(model):
            raise Unfit
        super().__init__(model, scope, positions, head_VH)
        self.few_rows = [self._few_rows_of(stack) for stack in self.stacks]
        head = head_of(head_VH)
        self._steps = None if head is None else greedy_steps(self.few_rows[0], self.few_rows[1:], head)

    def _few_rows_of(self, stack: Stack) -> FewRows | None:
        if self.embedding_VH is None or not stack.is_short or self.attached.drafter is not None:
            return None
        return few_rows(stack.layers, stack.last, self.embedding_VH, self.turns_L211C, stack.mtp)

    @override
    def product(self, weight: Tensor) -> Multiply:
        return product(weight)

    @override
    def run(self, number: int, tokens_BR: Tensor, given_SBH: Tensor | None, rows: Rows, cache: KVCache) -> Tensor:
        compiled = self.few_rows[number]
        if compiled is None or tokens_BR.numel() > MOST_ROWS:
            return super().run(number, tokens_BR, given_SBH, rows, cache)
        return compiled(tokens_BR, given_SBH, rows, cache)

    @override
    def draft(self, sequences: Sequences, passes: Sequence[Pass]) -> Tensor | None:
        steps = self._steps
        if steps is None or not (steps.drafts and _fit(sequences, passes)):
            return None
        return steps.draft(sequences, passes)

    @override
    def accept(self, sequences: Sequences, draft: Draft, passes: Sequence[Pass] = ()) -> StepOutput | None:
        steps, most = self._steps, (draft.nodes + 1) * len(sequences.token_ids)
        is_chain = draft.is_chain and draft.valid_BN is None
        if steps is None or not (steps.judges and is_chain and most <= MOST_ROWS and _fit(sequences, passes)):
            return None
        if passes and not (steps.drafts and len(passes) == draft.nodes):
            return None
        return steps.accept(sequences, draft, passes)


def _fit(sequences: Sequences, passes: Sequence[Pass]) -> bool:
    """Return whether these can run in compiled code."""
    most = max((one.count for one in passes), default=0) * len(sequences.token_ids)
    return most <= MOST_ROWS and sequences.all_live and all(one.keeps for one in passes)


def _has_room(model: nn.Module) -> bool:
    """Return whether a second copy of the weights fits into free memory; warn if not."""
    needed, free = sum(weight.nbytes for weight in model.parameters()), psutil.virtual_memory().available
    if needed > MOST_OF_FREE_MEMORY * free:
        _logger.warning(
            "decoding runs without compiled code, which is slower: packed weights need %.1f GiB, and %.1f GiB are free",
            needed / 2**30,
            free / 2**30,
        )
        return False
    return True
