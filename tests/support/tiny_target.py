"""A target and a drafter over three tokens with known distributions, to test sampling verifiers.

A verifier's K + 1 tokens (completed from the target if it stopped earlier) must have the target's joint distribution;
`p_value` runs a chi-square test over all V^(K+1) outcomes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.sampling import Noise, Sampling, draw
from megatron_mtp.decoding.verifiers import VerifierRule

V, K = 3, 2
SAMPLES = 200_000
PLAIN = SpeculativeConfig("mtp")
ALL = Sampling(temperature=1.0)

Tables = tuple[Tensor, Tensor, Tensor]


def tables(seed: int, sharpness: float = 1.5) -> Tables:
    """Return distributions of the first token [V], the second [V, V] and the third [V, V, V], each given the earlier
    ones.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [(V,) * (level + 1) for level in range(K + 1)]
    first, second, third = [
        (sharpness * torch.randn(shape, generator=generator, dtype=torch.double)).softmax(-1) for shape in shapes
    ]
    return first, second, third


TARGET, DRAFTER = tables(1), tables(2)


def processed(given: Tables, sampling: Sampling) -> Tables:
    """Return the distributions after `sampling`."""
    first, second, third = (sampling.probabilities(table.log()) for table in given)
    return first, second, third


def after(given: Tables, prefix_BJ: Tensor) -> Tensor:
    """Return the distribution [B, V] of the token after each prefix of 0, 1 or 2 tokens."""
    table = given[prefix_BJ.size(1)]
    return table[tuple(prefix_BJ.unbind(1))] if prefix_BJ.size(1) else table.expand(prefix_BJ.size(0), V)


def sampled_tree(children: tuple[int, ...], batch: int, seed: int = 3, drafter: Tables = DRAFTER) -> Draft:
    """Return a tree whose nodes at level i have `children[i]` children, independent samples of its q; (1, 1) is a
    chain.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, probs, parents = [], [], []
    level: list[tuple[int, Tensor]] = [(0, torch.zeros(batch, 0, dtype=torch.long))]
    for width in children:
        reached = []
        for row, prefix_BJ in level:
            q_BV = after(drafter, prefix_BJ)
            for _ in range(width):
                token_B = draw(q_BV, torch.rand(batch, generator=generator, dtype=torch.double))
                tokens.append(token_B)
                probs.append(q_BV)
                parents.append(row)
                reached.append((len(tokens), torch.cat([prefix_BJ, token_B.unsqueeze(1)], 1)))
        level = reached
    chain = children == (1,) * len(children)
    parents_BN = None if chain else torch.tensor(parents).expand(batch, -1)
    return Draft(torch.stack(tokens, 1), torch.stack(probs, 1), parents_BN)


def best_tree(children: tuple[int, ...], batch: int) -> Draft:
    """Return a tree of the drafter's most likely tokens instead of samples, and so without probabilities."""
    sampled = sampled_tree(children, 1)
    tokens: list[int] = []
    prefixes: list[list[int]] = [[]]
    taken: dict[int, int] = {}
    parents = sampled.parents()[0].tolist()
    for parent in parents:
        order = after(DRAFTER, torch.tensor([prefixes[parent]], dtype=torch.long))[0].argsort(descending=True)
        token = int(order[taken.get(parent, 0)])
        taken[parent] = taken.get(parent, 0) + 1
        tokens.append(token)
        prefixes.append([*prefixes[parent], token])
    parents_BN = None if sampled.is_chain else torch.tensor(parents).expand(batch, -1)
    return Draft(torch.tensor(tokens).expand(batch, -1), None, parents_BN)


def logits_of(draft: Draft) -> Tensor:
    """Return the target's log-probabilities of every row, [B, R, V]."""
    batch = draft.tokens_BN.size(0)
    prefixes = [torch.zeros(batch, 0, dtype=torch.long)]
    for node, parent in enumerate(draft.parents()[0].tolist()):
        prefixes.append(torch.cat([prefixes[parent], draft.tokens_BN[:, node : node + 1]], 1))
    return torch.stack([after(TARGET, prefix).log() for prefix in prefixes], 1)


def emitted(verifier: VerifierRule, draft: Draft, sampling: Sampling = ALL) -> Tensor:
    """Return K + 1 tokens of every sequence: those of the verdict, then the target's own, [B, K + 1]."""
    batch, target = draft.tokens_BN.size(0), processed(TARGET, sampling)
    round = Round(sampling, Noise(torch.arange(batch), torch.full((batch,), 7)), PLAIN)
    verdict = verifier(logits_of(draft), draft, round)
    rows = verdict.kept_BR.int().argsort(dim=1, descending=True, stable=True)[:, : K + 1]
    tokens = torch.cat([draft.tokens_BN[:, :1], draft.tokens_BN], 1).gather(1, rows)[:, 1:]
    generator = torch.Generator().manual_seed(11)
    out = torch.zeros(batch, 0, dtype=torch.long)
    for position in range(K + 1):
        own_B = draw(after(target, out), torch.rand(batch, generator=generator, dtype=torch.double))
        drafted_B = tokens[:, position] if position < tokens.size(1) else own_B
        accepted_B = verdict.accepted_B
        token_B = torch.where(
            position < accepted_B, drafted_B, torch.where(position == accepted_B, verdict.token_B, own_B)
        )
        out = torch.cat([out, token_B.unsqueeze(1)], 1)
    return out


def p_value(tokens_BJ: Tensor, sampling: Sampling = ALL) -> float:
    """Return p of the chi-square test against the exact joint distribution; 0 if an impossible outcome occurred."""
    first, second, third = processed(TARGET, sampling)
    expected = (first[:, None, None] * second[:, :, None] * third).flatten() * tokens_BJ.size(0)
    cell_B = (tokens_BJ * torch.tensor([V * V, V, 1])).sum(1)
    observed = torch.bincount(cell_B, minlength=V**3)
    possible = expected > 0
    if observed[~possible].any():
        return 0.0
    statistic = ((observed - expected) ** 2 / expected)[possible].sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2.0, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def fit(verifier: VerifierRule, make: Callable[..., Draft], children: tuple[int, ...], samples: int = SAMPLES) -> float:
    return p_value(emitted(verifier, make(children, samples)))
