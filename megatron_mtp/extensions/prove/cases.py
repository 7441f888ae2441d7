"""Test cases: layouts, kinds of batches, and options of the loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.extensions.prove.shrink import LAYERS, POSITIONS, VOCAB, Tiny

ROWS, MICROBATCHES = 2, 3

BATCHES = {
    "rows": "rows",
    "holes": "masked rows",
    "packed": "packed documents",
    "padded": "packed and padded documents",
    "unlabelled": "rows without labels",
}
"""Description of each kind of batch."""

OFFSETS = {"packed": ([0, 4, 12, 24], [0, 4, 12, 24]), "padded": ([0, 3, 8, 17], [0, 4, 12, 24])}
"""Starts and ends of documents, in their own tokens and with padding to a multiple of twice the context ranks."""

KEPT = (0.9, 0.3, 0.6, 0.75)
"""Fraction of tokens that count in each microbatch, if the mask has holes."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, and whether the MTP layers have a pipeline stage of their own."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    sequence_parallel: bool = False
    own_stage: bool = False

    @property
    def ranks(self) -> int:
        """Number of processes; experts are distributed over the data-parallel ranks."""
        return self.tensor * self.pipeline * self.context * self.data


ONE = Layout("1 process")
TP, SP = Layout("TP 2", tensor=2), Layout("TP 2 with sequence parallelism", tensor=2, sequence_parallel=True)
PP = Layout("PP 2", pipeline=2)
OWN_STAGE = Layout("MTP stage of its own", pipeline=2, own_stage=True)
DP, CP = Layout("DP 2", data=2), Layout("CP 2", context=2)
EP = Layout("EP 2", expert=2, data=2)
TP_CP = Layout("TP 2 with CP 2", tensor=2, context=2, sequence_parallel=True)

TRIED = {
    ONE: ("rows", "holes", "packed", "padded", "unlabelled"),
    TP: ("holes", "packed"),
    SP: ("holes", "packed"),
    PP: ("holes", "packed", "unlabelled"),
    OWN_STAGE: ("holes", "packed"),
    DP: ("holes", "packed"),
    CP: ("rows", "holes", "packed", "padded"),
    EP: ("holes", "packed"),
    TP_CP: ("holes", "packed"),
}
"""Kinds of batches to test in each layout."""


@dataclass(frozen=True)
class Case:
    """A test case: one step of the tiny model in a layout.

    Attributes:
        replicas: number of data-parallel ranks whose microbatches one process runs.
        in_bf16: whether parameters and activations are in BF16, with gradients accumulated in float32.
    """

    layout: Layout
    batch: str
    per_token: bool
    recompute: dict[str, Any] = field(default_factory=dict)
    own_option: bool = True
    replicas: int = 1
    in_bf16: bool = False

    @property
    def title(self) -> str:
        """Description of the case."""
        return f"{self.layout.name}, {self.kind}"

    @property
    def kind(self) -> str:
        """Description without the layout."""
        words = [BATCHES[self.batch] + (f" of {self.replicas} ranks" if self.replicas > 1 else "")]
        if self.recompute:
            words.append("recomputed activations")
        if not self.own_option:
            words.append("per-token loss" if self.per_token else "loss of microbatches")
        return " with ".join(words) + (" in BF16" if self.in_bf16 else "")

    @property
    def microbatches(self) -> int:
        """Number of microbatches on all data-parallel ranks."""
        return MICROBATCHES * self.layout.data * self.replicas

    def settings(self, depths: int) -> dict[str, Any]:
        """Return the fields of TransformerConfig that the case sets, given the number of MTP layers."""
        layout = self.layout
        found: dict[str, Any] = {
            "tensor_model_parallel_size": layout.tensor,
            "pipeline_model_parallel_size": layout.pipeline,
            "context_parallel_size": layout.context,
            "expert_model_parallel_size": layout.expert,
            "sequence_parallel": layout.sequence_parallel,
            "calculate_per_token_loss": self.per_token,
            "variable_seq_lengths": False,
        }
        if layout.own_stage:
            found["pipeline_model_parallel_layout"] = f"E{'t' * LAYERS}|{'m' * depths}L"
        return found | self.recompute


def cases_of(tiny: Tiny, everything: bool) -> tuple[list[Case], dict[str, str]]:
    """Return the cases of a model, its own layout first, and the reason for each layout that has no case."""
    sizes, per_token = tiny.sizes, bool(tiny.config["calculate_per_token_loss"])
    tensor, expert = sizes["tensor"] > 1, sizes["expert"] > 1
    own = {
        ONE: True,
        TP: tensor and not tiny.sequence_parallel,
        SP: tensor and tiny.sequence_parallel,
        PP: sizes["pipeline"] > 1 and not tiny.own_stage,
        OWN_STAGE: tiny.own_stage,
        DP: True,
        CP: sizes["context"] > 1,
        EP: expert,
        TP_CP: tensor and sizes["context"] > 1,
    }
    cases, skipped = list[Case](), dict[str, str]()
    if tiny.is_hybrid:
        own_options = (True, False) if everything else (True,)
        cases += [
            Case(ONE, batch, per_token == is_own, own_option=is_own, replicas=2)
            for is_own in own_options
            for batch in TRIED[DP]
        ]
    for layout in sorted(TRIED, key=lambda one: not own[one]):
        if layout is EP and "num_moe_experts" not in tiny.config:
            skipped[layout.name] = "the flags have no experts"
        elif layout is OWN_STAGE and tiny.attached:
            skipped[layout.name] = "attached layers have no stage of their own"
        elif layout is OWN_STAGE and tiny.is_hybrid:
            skipped[layout.name] = "a hybrid has its MTP layers on the last stage"
        elif own[layout] or everything:
            cases += _of_layout(tiny, layout, per_token, everything)
        else:
            skipped[layout.name] = "not a layout of the flags; --all tries it"
    return cases, skipped


def _of_layout(tiny: Tiny, layout: Layout, per_token: bool, everything: bool) -> Iterator[Case]:
    for batch in TRIED[layout]:
        yield Case(layout, batch, per_token)
    if tiny.in_bf16 and not tiny.is_hybrid and "num_moe_experts" not in tiny.config:
        for batch in TRIED[layout]:
            if batch in ("holes", "packed"):
                yield Case(layout, batch, per_token, in_bf16=True)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if layout in (ONE, CP, PP) and (tiny.recompute or everything):
        yield Case(layout, "holes", per_token, tiny.recompute or full)
    if everything and layout in (ONE, PP, DP, CP):
        for batch in TRIED[layout]:
            if batch in ("holes", "packed"):
                yield Case(layout, batch, not per_token, own_option=False)


@dataclass(frozen=True)
class Batch:
    """A microbatch: tokens, labels (or None) and loss mask, [rows, S] each.

    Attributes:
        held: starts and ends of documents in a packed row, including padding; None for plain rows.
        true: the same without padding; equal to `held` if nothing is padded.
    """

    tokens: Tensor
    labels: Tensor | None
    mask: Tensor
    held: list[int] | None = None
    true: list[int] | None = None

    @property
    def positions(self) -> Tensor:
        """Position of every token in its document, [rows, S]."""
        bounds = self.held or [0, self.tokens.size(1)]
        return torch.cat([torch.arange(end - start) for start, end in pairwise(bounds)]).expand_as(self.tokens)

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dict for the ranks, which do not import this class."""
        return vars(self) | {"positions": self.positions}


def batch_of(kind: str, number: int) -> Batch:
    """Create microbatch `number` of a kind, identical in every layout."""
    generator = torch.Generator().manual_seed(40 + number)

    def mask(*shape: int) -> Tensor:
        kept = KEPT[number % len(KEPT)] if kind != "rows" else 1.0
        return (torch.rand(*shape, generator=generator) < kept).float()

    if kind in ("rows", "holes", "unlabelled"):
        text = torch.randint(VOCAB, (ROWS, POSITIONS + 1), generator=generator)
        if kind == "unlabelled":
            return Batch(text[:, :-1], None, torch.ones(ROWS, POSITIONS))
        return Batch(text[:, :-1], text[:, 1:], mask(ROWS, POSITIONS))
    true, held = OFFSETS[kind]
    tokens, labels, counts = (torch.zeros(1, POSITIONS, dtype=torch.long) for _ in range(3))
    for (start, end), at in zip(pairwise(true), held, strict=False):
        length = end - start
        text = torch.randint(VOCAB, (length + 1,), generator=generator)
        tokens[0, at : at + length], labels[0, at : at + length] = text[:-1], text[1:]
        counts[0, at : at + length] = mask(length).long()
    return Batch(tokens, labels, counts.float(), held, true)
