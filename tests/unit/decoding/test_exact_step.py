"""The distribution of one step, enumerated instead of sampled: lossless rules match the target's to 1e-12.

Every draft is weighted by its probability under q. For each random number, what a rule keeps changes at one value,
which bisection finds; the token after the kept ones is weighted by its probability. Later tokens come from the target,
so that all outcomes have equal length. Wrong rules, which samples of a few thousand outputs catch only in some
settings, are off by more than 1e-3 in all of them.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from tiers import tiered
from torch import Tensor
from torch.nn.functional import one_hot

from megatron_mtp.decoding import verifiers
from megatron_mtp.decoding.batch import PenalizedVerifier
from megatron_mtp.decoding.config import VERIFIERS, SpeculativeConfig
from megatron_mtp.decoding.draft import Draft, Round, Verdict
from megatron_mtp.decoding.sampling import NO_PENALTIES, VERIFY, Penalties, Sampling, penalized

V, PROMPT = 3, [2, 0, 2]
CHAIN, TREE = (0, 1), (0, 0, 1)
"""Rows that the draft nodes continue; row 0 is the root, row n + 1 is node n."""

SAMPLINGS = {
    "temperature 0.5": Sampling(0.5),
    "temperature 1.7": Sampling(1.7),
    "top-k": Sampling(1.3, top_k=2),
    "top-p": Sampling(1.2, top_p=0.85),
    "min-p": Sampling(1.2, min_p=0.2),
}
PENALTIES = Penalties(presence=0.4, frequency=0.3, repetition=1.5, bias=((1, 0.7),))
NEVER = 1 - 2.0**-53
"""The largest random number, with which a rule keeps only what it must."""

Rule = Callable[[Tensor, Draft, Round], Verdict]
Path = tuple[int, ...]


@dataclass
class Given:
    """Random numbers of a round."""

    verify_BN: Tensor

    def uniform(self, stream: int, count: int) -> Tensor:
        return self.verify_BN[:, :count] if stream == VERIFY else torch.zeros(len(self.verify_BN), count)


@dataclass(frozen=True)
class Model:
    """Logits after every path of tokens, and samples from them."""

    seed: int
    sampling: Sampling
    penalties: Penalties = NO_PENALTIES

    def logits(self, path: Path) -> Tensor:
        place = torch.Generator().manual_seed(self.seed + int("9" + "".join(map(str, path))))
        return 1.5 * torch.randn(V, generator=place, dtype=torch.double)

    def probabilities(self, path: Path) -> Tensor:
        logits_1V = penalized(self.penalties, [*PROMPT, *path], len(PROMPT), self.logits(path).unsqueeze(0))
        return self.sampling.probabilities(logits_1V)[0]

    def joint(self, depth: int) -> dict[Path, float]:
        """Return the joint distribution of so many tokens."""
        found = {(): 1.0}
        for _ in range(depth):
            found = {
                (*path, token): chance * share
                for path, chance in found.items()
                for token, share in enumerate(self.probabilities(path).tolist())
            }
        return found


@dataclass
class Drafts:
    """All drafts of a shape, [B, N], each with its probability under q."""

    parents: Path
    target: Model
    drafter: Model
    reports: Callable[[Tensor], Tensor] = lambda q_V: q_V
    deterministic: bool = False

    def __post_init__(self) -> None:
        tokens, weights = list[Path](), list[float]()
        for drafted in itertools.product(range(V), repeat=len(self.parents)):
            q_NV = [self.drafter.probabilities(path) for path in self.rows(drafted)]
            if self.deterministic:
                q_NV = [one_hot(q_V.argmax(), V).double() for q_V in q_NV]
            chances = [q_V[token] for q_V, token in zip(q_NV, drafted, strict=True)]
            if weight := float(torch.stack(chances).prod()):
                tokens.append(drafted)
                weights.append(weight)
        self.tokens, self.weight_B = tokens, torch.tensor(weights, dtype=torch.double)
        logits = [[self.target.logits(path) for path in self.paths(drafted)] for drafted in tokens]
        self.logits_BRV = torch.stack([torch.stack(rows) for rows in logits])
        q_BNV = [[self.reports(self.drafter.probabilities(path)) for path in self.rows(drafted)] for drafted in tokens]
        self.draft = Draft(
            torch.tensor(tokens),
            None if self.deterministic else torch.stack([torch.stack(one) for one in q_BNV]),
            None if self.parents == CHAIN else torch.tensor(self.parents).expand(len(tokens), -1),
        )

    def rows(self, drafted: Path) -> list[Path]:
        """Return the tokens from the root to the row that every node continues."""
        paths = self.paths(drafted)
        return [paths[row] for row in self.parents]

    def paths(self, drafted: Path) -> list[Path]:
        """Return the tokens from the root to every row."""
        found: list[Path] = [()]
        for row, token in zip(self.parents, drafted, strict=True):
            found.append((*found[row], token))
        return found

    @property
    def depth(self) -> int:
        """Number of tokens of an outcome: the longest path and one more."""
        return 1 + max(map(len, self.paths((0,) * len(self.parents))))

    def kept(self, rule: Rule, verify_BN: Tensor) -> Tensor:
        """Return the nodes [B, N] that a rule keeps."""
        round = Round(self.target.sampling, Given(verify_BN), SpeculativeConfig("mtp"), [PROMPT] * len(self.tokens))
        if self.target.penalties != NO_PENALTIES:
            count = len(self.tokens)
            rule = PenalizedVerifier(rule, [self.target.penalties] * count, [len(PROMPT)] * count)
        return rule(self.logits_BRV, self.draft, round).kept_BR[:, 1:]


def outcomes(rule: Rule, drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> dict[Path, float]:
    """Return the probability of every outcome of a step under a rule."""
    tails: list[Tensor] = []

    def draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
        tails.append(weights_BV.double() / weights_BV.sum(-1, keepdim=True))
        return torch.zeros_like(uniform_B, dtype=torch.long)

    monkeypatch.setattr(verifiers, "draw", draw)
    found: dict[Path, float] = defaultdict(float)
    for verify_BN, weight_B in branches(rule, drafts):
        kept_BN = drafts.kept(rule, verify_BN).tolist()
        for row, drafted in enumerate(drafts.tokens):
            kept = itertools.compress(drafts.paths(drafted)[1:], kept_BN[row])
            path = max(kept, key=len, default=())
            for token, share in enumerate(tails[-1][row].tolist()):
                spread(found, drafts, (*path, token), float(weight_B[row]) * share)
    return found


def branches(rule: Rule, drafts: Drafts) -> list[tuple[Tensor, Tensor]]:
    """Return random numbers [B, N] for every set of nodes that can be kept, with the probability [B] of each."""
    size = len(drafts.tokens), len(drafts.parents)
    found = [(torch.full(size, NEVER, dtype=torch.double), drafts.weight_B)]
    for node in range(size[1]):
        split = []
        for verify_BN, weight_B in found:
            low_B, high_B = torch.zeros(size[0], dtype=torch.double), torch.ones(size[0], dtype=torch.double)
            for _ in range(45):
                middle_B = (low_B + high_B) / 2
                stays_B = drafts.kept(rule, with_number(verify_BN, node, middle_B))[:, node]
                low_B, high_B = torch.where(stays_B, middle_B, low_B), torch.where(stays_B, high_B, middle_B)
            edge_B = torch.where(high_B < 1e-12, 0.0, torch.where(low_B > 1 - 1e-12, 1.0, low_B))
            split.append((with_number(verify_BN, node, edge_B / 2), weight_B * edge_B))
            split.append((with_number(verify_BN, node, ((1 + edge_B) / 2).clamp(max=NEVER)), weight_B * (1 - edge_B)))
        found = split
    return found


def with_number(verify_BN: Tensor, node: int, number_B: Tensor) -> Tensor:
    changed_BN = verify_BN.clone()
    changed_BN[:, node] = number_B
    return changed_BN


def spread(found: dict[Path, float], drafts: Drafts, path: Path, chance: float) -> None:
    """Add an outcome, continued to full length by the target."""
    if not chance:
        return
    if len(path) >= drafts.depth:
        found[path[: drafts.depth]] += chance
        return
    for token, share in enumerate(drafts.target.probabilities(path).tolist()):
        spread(found, drafts, (*path, token), chance * share)


def error(rule: Rule, drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the largest difference of a probability from the target's."""
    found = outcomes(rule, drafts, monkeypatch)
    return max(abs(found[path] - chance) for path, chance in drafts.target.joint(drafts.depth).items())


RULES = [("rejection", CHAIN), ("block", CHAIN), ("rejection", TREE), ("specinfer", TREE), ("spectr", TREE)]
ALL = [(*rule, sampling) for rule in RULES for sampling in SAMPLINGS]
FIRST = [one for number, one in enumerate(ALL) if number % 5 in (number // 5, (number // 5 + 2) % 5)]


@pytest.mark.parametrize(("name", "parents", "sampling"), tiered(ALL, FIRST))
def test_a_lossless_rule_keeps_the_distribution(
    name: str, parents: Path, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Drafts(parents, Model(1, SAMPLINGS[sampling]), Model(2, SAMPLINGS[sampling]))
    assert error(VERIFIERS[name], drafts, monkeypatch) < 1e-12


@pytest.mark.parametrize("sampling", tiered([*SAMPLINGS], ("top-k", "min-p")))
@pytest.mark.parametrize("name", tiered(["rejection", "block"], ("rejection",)))
def test_a_deterministic_draft_keeps_the_distribution(
    name: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Drafts(CHAIN, Model(1, SAMPLINGS[sampling]), Model(2, SAMPLINGS[sampling]), deterministic=True)
    assert len(drafts.tokens) == 1
    assert error(VERIFIERS[name], drafts, monkeypatch) < 1e-12


@pytest.mark.parametrize("sampling", tiered([*SAMPLINGS], ("top-p",)))
def test_penalties_shift_the_target_alone(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Model(1, SAMPLINGS[sampling], PENALTIES)
    drafts = Drafts(CHAIN, target, Model(2, SAMPLINGS[sampling]))
    assert error(VERIFIERS["rejection"], drafts, monkeypatch) < 1e-12
    plain = replace(target, penalties=NO_PENALTIES).joint(3)
    assert max(abs(plain[path] - chance) for path, chance in target.joint(3).items()) > 1e-2


def recover_from_target(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """After a rejection, sample the target's own distribution, including draft tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifiers, "leftover", lambda p_BV, _: p_BV)
        return verifiers.rejection(logits_BRV, draft, round)


def flatter(q_V: Tensor) -> Tensor:
    """Return a drafter's distribution before its temperature."""
    return q_V.sqrt() / q_V.sqrt().sum()


WRONG = {
    "recovers from p, chain": (recover_from_target, CHAIN, lambda q_V: q_V),
    "recovers from p, tree": (recover_from_target, TREE, lambda q_V: q_V),
    "reports another q": (verifiers.rejection, CHAIN, flatter),
}


@pytest.mark.parametrize("sampling", tiered([*SAMPLINGS], ("temperature 0.5", "min-p")))
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_seen(wrong: str, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, parents, reports = WRONG[wrong]
    made = Drafts(parents, Model(1, SAMPLINGS[sampling]), Model(2, SAMPLINGS[sampling]), reports)
    assert error(rule, made, monkeypatch) > 1e-3
