"""Accepted lengths twice: as the engine drafts, and from one teacher-forced pass over the text that it made.

A step of the engine with the newest token t_m offers K drafts. Depth d of the chain that starts at position m - 1
drafts t_{m+d}. Where all tokens are the text's own, the training forward has its distribution q_d, and the trunk's p_d:

    greedy     the draft is accepted as long as argmax q_d = t_{m+d} at every depth so far
    sampled    drafts 1 .. j are accepted with sum_v min(p_j, q_j) prod_{d<j} min(1, q_d / p_d)(t_{m+d}), on average
               over texts of p: sum_x min(p, q)(x) f(x) is the mean of min(1, q / p)(x) f(x) over x drawn from p

Both are summed over the steps that the engine took, so that they differ from its count by sampling noise alone.

Letters in names: S positions, V vocabulary.

Run at 461eb56.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.data.batch import depth_batch
from megatron_mtp.drafting import generate
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling
from megatron_mtp.drafting.types import Emitted
from megatron_mtp.model.portable import square_mask
from megatron_mtp.model.head import StageOutput
from megatron_mtp.model.trunk import MTPTrunk

BATCH = 8
"""Prompts that run together."""


@dataclass
class Drafted:
    """Texts that the engine made, and its steps.

    Attributes:
        texts: each with its prompt.
        steps: of each text, its length when a step began and how many drafts were offered.
        accepted: drafts of each step, in the order of the steps.
    """

    texts: list[list[int]] = field(default_factory=list)
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens of a step: the accepted drafts and the trunk's own."""
        return 1 + sum(self.accepted) / max(len(self.accepted), 1)

    def acceptance(self, drafts: int) -> list[float]:
        """The part of the steps that accept their draft 1, 2, .., at least."""
        steps = max(len(self.accepted), 1)
        return [sum(one >= draft for one in self.accepted) / steps for draft in range(1, drafts + 1)]


def drafted(
    runner: Runner, prompts: list[list[int]], new: int, config: dict[str, Any], temperature: float, seed: int = 0
) -> Drafted:
    """All prompts continued."""
    made = Drafted()
    for first in range(0, len(prompts), BATCH):
        some = prompts[first : first + BATCH]
        lengths, steps = [len(prompt) for prompt in some], [list[tuple[int, int]]() for _ in some]

        def note(emitted: Emitted, lengths: list[int] = lengths, steps: list[Any] = steps) -> None:
            if emitted.draft is not None:
                steps[emitted.text].append((lengths[emitted.text], emitted.offered))
                made.accepted.append(emitted.accepted)
            lengths[emitted.text] += len(emitted.tokens)

        seeds = [seed + first + number for number in range(len(some))]
        out = generate(runner, some, new, Sampling(temperature), config, seeds, emit=note)
        made.texts += [prompt + text for prompt, text in zip(some, out.token_ids, strict=True)]
        made.steps += steps
    return made


def forced_length(model: MTPTrunk, made: Drafted, temperature: float) -> float:
    """The accepted length that the training forward expects of the same steps."""
    accepted = 0.0
    for text, steps in zip(made.texts, made.steps, strict=True):
        trunk_SV, *depths = forward(model, text)
        accepted += sum(expected(text, step, trunk_SV, depths, temperature) for step in steps)
    return 1 + accepted / max(sum(map(len, made.steps)), 1)


def expected(
    text: list[int], step: tuple[int, int], trunk_SV: Tensor, depths: list[Tensor], temperature: float
) -> float:
    """Drafts of one step that are accepted; logits of the trunk and of every depth over the whole text."""
    length, offered = step
    newest, total, chance = length - 1, 0.0, 1.0
    for depth in range(1, offered + 1):
        token, logits_V = text[newest + depth], depths[depth - 1][newest - 1]
        if not temperature:
            if int(logits_V.argmax()) != token:
                return total
            total += 1
            continue
        p_V, q_V = ((one / temperature).softmax(-1) for one in (trunk_SV[newest + depth - 1], logits_V))
        total += chance * float(torch.minimum(p_V, q_V).sum())
        chance *= min(1.0, float(q_V[token] / p_V[token]))
    return total


@torch.no_grad()
def forward(model: MTPTrunk, text: list[int]) -> list[Tensor]:
    """Logits [S, V] of the trunk and of every depth, by the forward of training."""

    def logits(stage: StageOutput) -> list[Tensor]:
        states: Iterable[Tensor] = (stage.hidden_SBH, *stage.drafted[0].hidden)
        return [stage.head.project(state_SBH)[:, 0, : model.true_vocab_size].clone() for state_SBH in states]

    tokens_BS = torch.tensor([text], device="cuda")
    batch: dict[str, Any] = {"tokens": tokens_BS, "labels": tokens_BS, "loss_mask": torch.ones_like(tokens_BS).float()}
    positions_BS = torch.arange(len(text), device="cuda").unsqueeze(0)
    mask = square_mask(len(text), "cuda")
    shifted = depth_batch(batch, model.mtp.depths)
    out: list[Tensor] = model(
        tokens_BS, positions_BS, mask, output_processor=logits, output_processor_context=[shifted]
    )
    return out
