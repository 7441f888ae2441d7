"""Random output layers, states and targets for the chunked losses, and values and gradients of both implementations."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.losses import linear_cross_entropy
from megatron_mtp.losses.linear_cross_entropy import Targets, Teacher, linear_loss
from megatron_mtp.losses.reference import plain_loss
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.model.vocabulary import Vocabulary
from megatron_mtp.spec.config import MTPConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "ce": {},
    "ce smoothed": {"mtp_label_smoothing": 0.1},
    "ce with z-loss": {"mtp_z_loss": 1e-2},
    "ce with both": {"mtp_label_smoothing": 0.2, "mtp_z_loss": 1e-3},
    "kd": {"mtp_loss": "kd"},
    "kd tempered": {"mtp_loss": "kd", "mtp_temperature": 2.0},
    "tv": {"mtp_loss": "tv"},
    "tv tempered": {"mtp_loss": "tv", "mtp_temperature": 0.5},
    "nla": {"mtp_loss": "nla"},
    "nla tempered": {"mtp_loss": "nla", "mtp_temperature": 2.0},
    "lk": {"mtp_loss": "lk"},
    "lk tempered": {"mtp_loss": "lk", "mtp_temperature": 0.5, "mtp_lk_eta": 1.0},
    "e2e_tv": {"mtp_loss": "e2e_tv"},
    "e2e_tv tempered": {"mtp_loss": "e2e_tv", "mtp_temperature": 2.0},
    "dpace": {"mtp_loss": "dpace"},
    "mix": {"mtp_loss": "mix", "mtp_loss_mix": "0.2,0.3,0.5"},
    "mix by names": {"mtp_loss": "mix", "mtp_loss_mix": "tv=0.7,ce=0.3"},
    "mix of acceptance": {"mtp_loss": "mix", "mtp_loss_mix": "nla=0.7,lk=0.3"},
}


@dataclass(frozen=True)
class Case:
    """Shapes and chunking of one comparison."""

    positions: int
    depths: int
    hidden: int
    vocabulary: int
    rows_at_once: int
    logit_scale: float
    seed: int
    padding: int = 0

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        """Draw one to three depths, up to 48 positions, odd sizes, and chunks of any number of rows."""
        draw = random.Random(seed)
        return cls(
            draw.randint(1, 48),
            draw.randint(1, 3),
            hidden=draw.randint(2, 24),
            vocabulary=draw.randint(8, 120),
            rows_at_once=draw.randint(1, 64),
            logit_scale=draw.choice([1.0, 0.5]),
            seed=seed,
        ).padded(draw.choice([0, 1, 7, 150]))

    def padded(self, least: int) -> "Case":
        """Return the case with at least so many rows of padding, one more if two ranks could not split the rows."""
        return replace(self, padding=least + (self.vocabulary + least) % 2)

    @property
    def rows(self) -> int:
        return self.vocabulary + self.padding

    def leaves(self, settings: MTPConfig | None = None) -> tuple[list[Tensor], Targets, Tensor, Tensor]:
        """Return states [N, H] and targets of every depth, the head's weight with padding, and the trunk's states.

        If the loss couples depths, a position has the same weight at all of them.
        """
        generator = torch.Generator().manual_seed(self.seed)
        positions, hidden = self.positions, self.hidden
        states = [torch.randn(positions, hidden, generator=generator) for _ in range(self.depths)]
        shape = self.depths, positions
        mask_DN = (torch.rand(shape, generator=generator) > 0.3) * torch.rand(shape, generator=generator)
        targets = Targets(
            torch.randint(self.vocabulary, shape, generator=generator),
            mask_DN,
            torch.rand(self.depths, generator=generator),
            torch.arange(positions) + torch.arange(1, self.depths + 1).unsqueeze(1),
        )
        if settings is not None and depth_loss(settings).couples_depths:
            targets = replace(targets, mask_DN=mask_DN[:1].expand_as(mask_DN))
        weight_VH = torch.randn(self.rows, hidden, generator=generator) / hidden**0.5
        trunk_TH = torch.randn(positions + self.depths + 1, hidden, generator=generator)
        return states, targets, weight_VH, trunk_TH

    def drafted(self) -> Tensor:
        """Return the tokens of a draft vocabulary in ascending order, including the first and the last token."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        kept_V = torch.rand(self.vocabulary, generator=generator) < 0.4
        kept_V[0] = kept_V[-1] = True
        return kept_V.nonzero()[:, 0]

    def plain(self, settings: MTPConfig, drafted_K: Tensor | None = None) -> list[Tensor]:
        """Return value, gradients of the states, and gradient of the weight, in float64."""
        states, targets, weight_VH, trunk_TH = self.leaves(settings)
        states = [state_NH.double().requires_grad_() for state_NH in states]
        weight_VH, trunk_TH = weight_VH.double().requires_grad_(), trunk_TH.double()
        exact = replace(targets, mask_DN=targets.mask_DN.double(), scale_D=targets.scale_D.double())
        tokens_VH = weight_VH[: self.vocabulary]
        value = plain_loss(settings, states, exact, tokens_VH, self.logit_scale, drafted_K, trunk_TH)
        value.backward()
        return [value.detach(), *(state.grad for state in states), weight_VH.grad]  # type: ignore[list-item]

    def entries(self, slice_size: int, group: ProcessGroup | None = None) -> Vocabulary:
        return Vocabulary(slice_size, group, self.logit_scale, tokens=self.vocabulary if self.padding else None)

    def chunked(
        self, settings: MTPConfig, group: ProcessGroup | None = None, drafted_K: Tensor | None = None
    ) -> list[Tensor]:
        """Return the same from `linear_loss` over a group's slices; a rank's weight gradient is that of its slice."""
        states, targets, weight_VH, trunk_TH = self.leaves(settings)
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        slice_VH = weight_VH.chunk(ranks)[rank].clone().requires_grad_()
        states = [state_NH.requires_grad_() for state_NH in states]
        token_loss = depth_loss(settings)
        linear_cross_entropy.CHUNK_BYTES = 4 * len(slice_VH) * self.rows_at_once
        linear_cross_entropy.BLOCK_BYTES = linear_cross_entropy.CHUNK_BYTES // 2
        linear_cross_entropy.LEAST_POSITIONS = 1
        rows, vocabulary, head = slice_VH, self.entries(len(slice_VH), group), None
        if drafted_K is not None:
            drafts = DraftVocabulary(drafted_K, len(slice_VH), ranks, rank)
            rows = slice_VH[drafts.rows_K]
            vocabulary = replace(vocabulary, slice_size=len(rows), draft_vocabulary=drafts)
            targets = replace(targets, labels_DN=drafts.index_V[targets.labels_DN])
            head = slice_VH if token_loss.needs_whole_teacher else None
        teacher = Teacher(trunk_TH, head) if token_loss.needs_teacher else None
        value, _ = linear_loss(token_loss, states, targets, rows, vocabulary, teacher)
        (3 * value).backward()  # tests the upstream gradient
        gradients = [leaf.grad / 3 for leaf in (*states, slice_VH) if leaf.grad is not None]
        if group is not None:
            for gradient in gradients[:-1]:
                torch.distributed.all_reduce(gradient, group=group)
        return [value.detach(), *gradients]


def worst(ours: list[Tensor], plain: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest entry."""
    differences = [
        ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
        for mine, theirs in zip(ours, plain, strict=True)
    ]
    return max(differences)
