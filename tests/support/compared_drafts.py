"""Logits of draft tokens, and the distance between two models."""

import torch
from drafting_single import sequences_of
from torch import Tensor

from megatron_mtp.decoding.rows import CHUNK
from megatron_mtp.decoding.runner import Runner

SINGLE = 4
"""Rows at the end of a prompt that run one by one."""


def off(ours_SV: Tensor, theirs_SV: Tensor) -> float:
    """Return the largest difference over shared slots and tokens, relative to the largest logit."""
    slots, vocabulary = (min(sizes) for sizes in zip(ours_SV.shape, theirs_SV.shape, strict=True))
    theirs_SV = theirs_SV[:slots, :vocabulary]
    return ((ours_SV[:slots, :vocabulary] - theirs_SV).abs().max() / theirs_SV.abs().max().clamp(min=1)).item()


@torch.inference_mode()
def drafted_logits(runner: Runner, tokens_BS: Tensor) -> dict[str, Tensor]:
    """Return logits [S, V] of trunk and MTP layers with the cache: first in chunks like a prompt, then row by row."""
    slots = tokens_BS.size(1) - runner.depths
    sequences = sequences_of(runner, tokens_BS.tolist(), tokens_BS.size(1) + 1)
    caches = sequences.memory.depths
    found: dict[str, list[Tensor]] = {}
    for first, count in pieces(slots):
        first_B = torch.tensor([first], device=runner.device)
        rows = sequences.chain(first_B, count, 0)
        state_SBH = runner.trunk(sequences.tokens_at(first_B, count), rows, sequences.memory.cache)
        found.setdefault("trunk", []).append(runner.logits(state_SBH)[0])
        for depth, cache in enumerate(caches, start=1):
            state_SBH = runner.depth(depth, state_SBH, sequences.tokens_at(first_B + depth, count), rows, cache)
            found.setdefault(f"depth {depth}", []).append(runner.draft_logits(state_SBH)[0])
    return {name: torch.cat(parts).cpu() for name, parts in found.items()}


def pieces(slots: int) -> list[tuple[int, int]]:
    """Return first slot and number of slots of each forward pass."""
    together = slots - SINGLE
    chunks = [(start, min(CHUNK, together - start)) for start in range(0, together, CHUNK)]
    return chunks + [(start, 1) for start in range(together, slots)]
