"""What drafting gains: acceptance on a trained model, and speed against plain decoding and against transformers.

    python benchmarks/drafting.py                         runs/quickstart/checkpoint and a model of 120 M parameters
    python benchmarks/drafting.py --part acceptance       what the methods accept on the trained model's held-out text
    python benchmarks/drafting.py --part speed            float32 and bfloat16, batch 1 and 8
    python benchmarks/drafting.py --quick                 does it run? (the figures mean nothing)

Prompts are windows of the documents that training left out. Both sides of a comparison run the same weights (ours are
exported) and take turns, run by run; a ratio is the median of those within a round. Ours and transformers' greedy tokens
have to be the same, or the benchmark ends with an error; in bfloat16, where rounding may part them, it says how many are.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from megatron_mtp.platform import prepare

ON_CPU = prepare()

import torch  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.agreeing import agreeing_model  # noqa: E402
from benchmarks.harness import Goal, hardware, interleave, report, table  # noqa: E402
from benchmarks.llama import greedy, llama_of  # noqa: E402
from megatron_mtp.drafting import generate, load_runner  # noqa: E402
from megatron_mtp.drafting.kv_cache import FORBIDDEN, Rows  # noqa: E402
from megatron_mtp.drafting.load import join_world  # noqa: E402
from megatron_mtp.drafting.proposers import PROPOSERS  # noqa: E402
from megatron_mtp.drafting.proposers.mtp import Vanilla  # noqa: E402
from megatron_mtp.drafting.report import merged  # noqa: E402
from megatron_mtp.drafting.runner import Runner  # noqa: E402
from megatron_mtp.drafting.sampling import Sampling  # noqa: E402
from megatron_mtp.drafting.types import AcceptanceStats  # noqa: E402

CHAINS = {f"mtp_eagle K={k}": {"method": "mtp_eagle", "num_speculative_tokens": k} for k in (2, 3, 4, 6, 8, 11, 14)}
TREES = {
    "tree 4,2,1": {"method": "mtp_tree", "tree": [4, 1, 1]},
    "dynamic 14 of depth 4": {
        "method": "mtp_tree",
        "tree_nodes": 14,
        "num_speculative_tokens": 4,
        "beam_width": 4,
    },
    "dynamic 14 of depth 5": {
        "method": "mtp_tree",
        "tree_nodes": 14,
        "num_speculative_tokens": 5,
        "beam_width": 4,
    },
    "dynamic 14 of depth 6": {
        "method": "mtp_tree",
        "tree_nodes": 14,
        "num_speculative_tokens": 6,
        "beam_width": 3,
    },
}
VANILLA = {"method": "mtp", "num_speculative_tokens": 2}


class SinglePosition(Vanilla):
    """Planted: every draft from row m - 1 alone, as without an MTP cache."""

    def start(self, sequences: Any) -> None:
        super().start(sequences)
        chain = sequences.chain

        def alone(first_B: Tensor, rows: int, beyond: int) -> Rows:
            made = chain(first_B, rows, beyond)
            slot_W = torch.arange(made.window)
            own_BRW = slot_W == made.positions_BR.unsqueeze(2)
            mask_B1RW = torch.zeros_like(made.mask_B1RW).masked_fill_(~own_BRW.unsqueeze(1), FORBIDDEN)
            return Rows(made.positions_BR, made.slots_BR, mask_B1RW) if self._drafting else made

        sequences.chain = alone
        self._drafting = False

    def propose(self, *arguments: Any) -> Any:
        self._drafting = True
        try:
            return super().propose(*arguments)
        finally:
            self._drafting = False


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    prompts: int
    new_tokens: int
    rounds: int
    layers: int
    hidden: int

    @property
    def speed_tokens(self) -> int:
        return min(self.new_tokens, 96)


FULL, QUICK = Scale(32, 160, 3, 8, 1024), Scale(2, 12, 1, 2, 128)


def held_out(prefix: Path, count: int, length: int) -> list[list[int]]:
    """Windows of the last 2 % of the documents, which `--split 98,2,0` left out."""
    data = IndexedDataset(str(prefix))
    documents = len(data)
    long = [number for number in range(int(0.98 * documents), documents) if data.sequence_lengths[number] > 4 * length]
    step = max(len(long) // count, 1)
    return [data[number][length : 2 * length].tolist() for number in long[::step][:count]]


def acceptance(runner: Runner, prompts: list[list[int]], scale: Scale) -> tuple[dict[str, Any], list[Goal]]:
    """Accepted lengths of the methods on a trained model; greedy ones must emit what plain decoding does."""
    plain = _texts(runner, prompts, scale, None)[0]
    PROPOSERS["single_position"] = SinglePosition
    results: dict[str, Any] = {}
    tokens = 0
    for name, config in {
        "mtp": VANILLA,
        "mtp_trunk_states": {**VANILLA, "method": "mtp_trunk_states"},
        "lookahead": {"method": "lookahead"},
        "ngram K=4": {"method": "ngram", "num_speculative_tokens": 4},
        **CHAINS,
        **TREES,
    }.items():
        texts, stats = _texts(runner, prompts, scale, config)
        if texts != plain:
            raise SystemExit(f"{name} emits other tokens than plain decoding")
        tokens += stats.emitted
        results[name] = _figures(stats)
    results["identical_tokens"] = tokens
    results["single position"] = _figures(_single(runner, prompts, scale))
    results |= _sampled(runner, prompts, scale)
    return results, _acceptance_goals(results)


def _single(runner: Runner, prompts: list[list[int]], scale: Scale) -> AcceptanceStats:
    original = PROPOSERS["mtp"]
    PROPOSERS["mtp"] = SinglePosition
    try:
        return _texts(runner, prompts, scale, VANILLA)[1]
    finally:
        PROPOSERS["mtp"] = original


def _sampled(runner: Runner, prompts: list[list[int]], scale: Scale) -> dict[str, Any]:
    """At temperature 1: how much is accepted, and for `joint` how likely the texts are under the target."""
    results = {}
    rules: dict[str, dict[str, Any]] = {
        "sampled rejection": VANILLA,
        "sampled block": {**VANILLA, "verifier": "block"},
        "sampled without q": {**VANILLA, "use_draft_probs": False},
        "sampled eagle K=4": {"method": "mtp_eagle", "num_speculative_tokens": 4},
    }
    for tau in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9):
        beam = {"method": "mtp_beam", "num_speculative_tokens": 4, "beam_width": 4}
        rules[f"joint tau={tau}"] = {**beam, "verifier": "joint", "threshold": tau}
    for name, config in rules.items():
        texts, stats = _texts(runner, prompts, scale, config, Sampling(1.0))
        results[name] = {**_figures(stats), "perplexity": _perplexity(runner, prompts, texts)}
    return results


@torch.inference_mode()
def _perplexity(runner: Runner, prompts: list[list[int]], texts: list[list[int]]) -> float:
    """Of the emitted tokens under the target at temperature 1."""
    from megatron_mtp.drafting.kv_cache import KVCache, chain_rows

    total, count = 0.0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        whole = torch.tensor([prompt + text])
        length = whole.size(1)
        rows = chain_rows(torch.zeros(1, dtype=torch.long), length, length, length)
        hidden_SBH = runner.trunk(whole, rows, KVCache(runner.trunk_layers, 1, length))
        log_probs = runner.logits(hidden_SBH)[0].log_softmax(-1)
        target = whole[0, len(prompt) :]
        total -= log_probs[len(prompt) - 1 : -1].gather(1, target.unsqueeze(1)).sum().item()
        count += len(text)
    return float(torch.tensor(total / count).exp())


def _texts(
    runner: Runner,
    prompts: list[list[int]],
    scale: Scale,
    config: dict[str, Any] | None,
    sampling: Sampling | None = None,
) -> tuple[list[list[int]], AcceptanceStats]:
    parts = []
    for first in range(0, len(prompts), 8):
        some = prompts[first : first + 8]
        seeds = list(range(first, first + len(some)))
        parts.append(generate(runner, some, scale.new_tokens, sampling, config, seeds))
    return [text for part in parts for text in part.token_ids], merged([part.stats for part in parts])


def _figures(stats: AcceptanceStats) -> dict[str, Any]:
    hits, offers = stats.accepted_at, stats.offered_at
    given = [hit / max(before, 1) for hit, before in zip(hits, [offers[0] if offers else 1, *hits], strict=False)]
    return {
        "accepted_length": round(stats.accepted_length, 4),
        "accepted_per_forward": round(stats.accepted / stats.target_forwards, 4),
        "accepted_given_the_earlier": [round(rate, 4) for rate in given],
    }


def _acceptance_goals(results: dict[str, Any]) -> list[Goal]:
    def rate(name: str, position: int) -> float:
        return results[name]["accepted_given_the_earlier"][position]

    chain = max(results[name]["accepted_length"] for name in ("mtp", *CHAINS))
    tree = max(results[name]["accepted_length"] for name in TREES)
    base = results["sampled rejection"]
    likely = max(
        (
            (one["accepted_length"] / base["accepted_length"], one["perplexity"] / base["perplexity"])
            for name, one in results.items()
            if name.startswith("joint")
        ),
        key=lambda pair: (pair[1] <= 0.79, pair[0]),
    )
    return [
        Goal("second draft: mtp less the trunk's states, points", 100 * (rate("mtp", 1) - rate("mtp_trunk_states", 1)), 8, ">="),
        Goal("first draft: mtp less a single position, points", 100 * (rate("mtp", 0) - rate("single position", 0)), 4, ">="),
        Goal("rejection with q over without, accepted", base["accepted_per_forward"] / results["sampled without q"]["accepted_per_forward"], 1.3, ">="),
        Goal("block over rejection, accepted", results["sampled block"]["accepted_per_forward"] / base["accepted_per_forward"], 1.0, ">="),
        Goal("tree of 15 rows over the best chain, accepted length", tree / chain, 1.1, ">="),
        Goal("joint: perplexity over speculative sampling's", likely[1], 0.79, "<="),
        Goal("joint: tokens per forward over speculative sampling's", likely[0], 1.42, ">="),
    ]  # fmt: skip


def speed(
    name: str, runner: Runner, llama: Any, prompts: list[list[int]], scale: Scale
) -> tuple[dict[str, Any], list[Goal]]:
    """Seconds of the same texts: plain and drafting, ours and transformers', and ours at batch 8."""
    trunk, depths = llama
    new, prompt, eight = scale.speed_tokens, prompts[0], (prompts * 8)[:8]
    stats: dict[str, AcceptanceStats] = {}
    texts: dict[str, list[int]] = {}

    def ours(side: str, batch: list[list[int]], config: dict[str, Any] | None) -> Callable[[], None]:
        def run() -> None:
            made = generate(runner, batch, new, None, config)
            stats[side], texts[side] = made.stats, made.token_ids[0]

        return run

    def theirs(side: str, with_depths: bool) -> Callable[[], None]:
        def run() -> None:
            texts[side] = greedy(trunk, depths if with_depths else None, prompt, new)

        return run

    count = runner.depths
    sides = {
        "plain": ours("plain", [prompt], None),
        "draft": ours("draft", [prompt], {"method": "mtp", "num_speculative_tokens": count}),
        "auto": ours("auto", [prompt], {"method": "mtp", "num_speculative_tokens": "auto"}),
        "draft of 8": ours("draft of 8", eight, {"method": "mtp", "num_speculative_tokens": count}),
        "transformers": theirs("transformers", False),
        "transformers mtp": theirs("transformers mtp", True),
    }
    spent = interleave(sides, scale.rounds, warm_up=1)
    seconds = {side: [one.wall for one in rounds] for side, rounds in spent.items()}
    _check_tokens(name, texts, runner.dtype)
    return _speed_results(name, seconds, stats, count, new)


def _check_tokens(name: str, texts: dict[str, list[int]], dtype: torch.dtype) -> None:
    for side, text in texts.items():
        same = next((n for n, (a, b) in enumerate(zip(text, texts["plain"], strict=True)) if a != b), len(text))
        if same < len(text):
            print(f"{name}: {side} parts from plain decoding after {same} of {len(text)} tokens")
            if dtype == torch.float32 and not side.startswith("transformers"):
                raise SystemExit("ours must not")


def _speed_results(
    name: str, seconds: dict[str, list[float]], stats: dict[str, AcceptanceStats], count: int, new: int
) -> tuple[dict[str, Any], list[Goal]]:
    def ratio(slow: str, fast: str, times: float = 1.0) -> float:
        return times * statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))

    draft = stats["draft"]
    forwards = max(draft.target_forwards - 1, 1)
    plain_forward = statistics.median(seconds["plain"]) / new
    cost = draft.drafter_seconds / forwards / count / plain_forward
    bound = draft.accepted_length / (1 + cost * count)
    results = {
        "tokens_per_second": {
            side: round((8 if side.endswith("8") else 1) * new / statistics.median(times), 1)
            for side, times in seconds.items()
        },
        "accepted_length": round(draft.accepted_length, 3),
        "drafter_cost": round(cost, 4),
        "plain_forward_ms": round(1000 * plain_forward, 3),
    }
    large = name.startswith("large")
    goals = [
        Goal(f"{name}: drafting over plain, against its bound", ratio("plain", "draft") / bound, 0.9, ">="),
        Goal(f"{name}: auto over plain", ratio("plain", "auto"), 0.98, ">="),
        Goal(
            f"{name}: drafting over transformers' MTP", ratio("transformers mtp", "draft"), 1.3 if large else 2.0, ">="
        ),
        Goal(f"{name}: 8 texts at once over transformers' MTP", ratio("transformers mtp", "draft of 8", 8), 2.5, ">="),
    ]
    if large:
        goals.append(Goal(f"{name}: plain over transformers' generate", ratio("transformers", "plain"), 1.3, ">="))
    return results, goals


def speeds(checkpoint: Path | None, prompts: list[list[int]], scale: Scale) -> tuple[dict[str, Any], list[Goal]]:
    """The trained model, and the large one with drafts that agree often and never, in both precisions."""
    results: dict[str, Any] = {}
    goals: list[Goal] = []
    cases: list[tuple[str, float, torch.dtype]] = [
        ("large float32", 0.5, torch.float32),
        ("large bfloat16", 0.5, torch.bfloat16),
        ("large float32, drafts that err", 50.0, torch.float32),
    ]
    for name, noise, dtype in cases:
        model = agreeing_model(scale.layers, scale.hidden, 8192, 2, noise)
        llama = llama_of(model, dtype)
        found, wanted = speed(name, Runner(model.to(dtype)), llama, [list(range(5, 37))], scale)
        results[name], goals = found, goals + wanted
        del model, llama
    if checkpoint is not None:
        runner = load_runner(checkpoint)
        results["quickstart"], wanted = speed(
            "quickstart", runner, llama_of(runner.model, torch.float32), prompts, scale
        )
        goals += wanted
    return results, goals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    parser.add_argument("--data", type=Path, default=Path("runs/quickstart/data/corpus"), help="its .bin/.idx prefix")
    parser.add_argument("--part", choices=["acceptance", "speed", "all"], default="all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    scale = QUICK if args.quick else FULL
    if not args.checkpoint.is_dir():
        parser.error(f"there is no {args.checkpoint}; make it with scripts/quickstart.sh, or give --checkpoint.")
    join_world()
    prompts = held_out(args.data, scale.prompts, 64)
    results: dict[str, Any] = {}
    goals: list[Goal] = []
    if args.part != "speed":
        results["acceptance"], found = acceptance(load_runner(args.checkpoint), prompts, scale)
        goals += found
    if args.part != "acceptance":
        results["speed"], found = speeds(args.checkpoint, prompts, scale)
        goals += found
    tables = [_accepted_table(results["acceptance"])] if "acceptance" in results else []
    report("drafting", hardware(ON_CPU), results, goals, tables)


def _accepted_table(results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            one["accepted_length"],
            one.get("perplexity"),
            " ".join(f"{r:.3f}" for r in one["accepted_given_the_earlier"]),
        ]
        for name, one in results.items()
        if isinstance(one, dict)
    ]
    return table(["method", "accepted length", "perplexity", "accepted, given the earlier"], rows)


if __name__ == "__main__":
    main()
