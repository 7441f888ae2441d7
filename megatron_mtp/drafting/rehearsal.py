"""How often the first depth is right about the prompt, before anything is drafted.

The trunk has run the prompt, so depth 1 can be run over its last W rows as in training, and the trunk's own
distribution judges what it would have drafted there:

    n = 6 tokens t_0 .. t_5, W = 3      depth 1, rows 2, 3, 4: (h_0[2], t_3) (h_0[3], t_4) (h_0[4], t_5)
                                        judged by the trunk's rows 3, 4, 5

These rows are a text of their own in a cache of their own, so that the cost is one forward of W rows however long the
prompt is. The depth does not see what came before them, which makes it err a little more often than it will.

Letters in names: S rows, B batch, W rows that are judged, H hidden, V vocabulary.
"""

import torch
from torch import Tensor

from megatron_mtp.drafting.kv_cache import KVCache, chain_rows
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling, SamplingByText
from megatron_mtp.drafting.sequences import Sequences

FEWEST, MOST = 8, 10
"""Rows of each prompt that are judged; of a shorter prompt none are. A depth that is right about three tokens in ten
errs at all of ten rows once in 35 prompts."""


def rehearse(runner: Runner, sequences: Sequences, sampling: Sampling | SamplingByText) -> tuple[float, int] | None:
    """The chance that a first draft is accepted, sum of min(p, q), and the rows of a text it is the mean of.

    Args:
        sequences: prompts that the trunk has run, each with its first new token.

    Returns:
        None where a prompt is too short.
    """
    width = min(MOST, min(sequences.prompt_lengths) - 1)
    if width < FEWEST:
        return None
    first_B = sequences.newest_B - 1 - width
    rows = chain_rows(torch.zeros_like(first_B), width, width, width)
    cache = KVCache(runner.depth_layers, first_B.size(0), width)
    states_SBH = sequences.states_at(first_B, width + 1)
    drafted_SBH = runner.depth(1, states_SBH[:-1], sequences.tokens_at(first_B + 1, width), rows, cache)
    drafts_BWV, trunk_BWV = runner.draft_logits(drafted_SBH), runner.logits(states_SBH[1:])
    return float(_overlap_BW(sampling, drafts_BWV, trunk_BWV).mean()), width


def _overlap_BW(sampling: Sampling | SamplingByText, draft_BWV: Tensor, trunk_BWV: Tensor) -> Tensor:
    """Sum of min(p, q); 1 or 0 where both choose the most probable token."""
    if sampling.greedy:
        return (draft_BWV.argmax(dim=-1) == trunk_BWV.argmax(dim=-1)).float()
    return torch.minimum(sampling.probabilities(trunk_BWV), sampling.probabilities(draft_BWV)).sum(dim=-1)
