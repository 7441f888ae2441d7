"""What drafting gains on a trained checkpoint: its held-out texts, drafted and decoded plainly in turn.

    python studies/gain.py                              the quickstart's model, float32 and bfloat16
    python studies/gain.py --checkpoint runs/attached/checkpoint --data runs/attached/data/corpus --counts 2
    python studies/gain.py --counts 3,auto --threads 1  K = 3, and K by what is accepted; one thread
    python studies/gain.py --quick                      does it run? (the figures mean nothing)

Texts run one at a time; the seconds of a text are the median of its repeats. The speed-up is that of all texts
together; beside it stands the median of the texts' own. In float32 drafts have to leave every text as it is, or the
benchmark ends with an error.

Run at d398b40.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from tqdm import tqdm

from benchmarks.decoding import check_tokens
from benchmarks.harness import Goal, count, hardware, interleave, report, some_of, Table
from megatron_mtp.drafting import generate, load_runner
from megatron_mtp.drafting.api import Generated
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.types import AcceptanceStats, merged
from megatron_mtp.model.build import join_world
from studies.drafting import ON_CPU, held_out

PROMPT = 64
PLAIN = "plain"
GOAL = 1.5
AUTO = "auto"
COUNTS = (*(str(number) for number in range(1, 17)), AUTO)


def main() -> None:
    wanted = parse(sys.argv[1:])
    torch.set_num_threads(wanted.threads)
    join_world()
    prompts = held_out(wanted.data, wanted.texts, PROMPT)
    results = {name: gains(name, prompts, wanted) for name in ("float32", "bfloat16")}
    best = max(found["speed_up"] for found in results["bfloat16"].values())
    columns = ("accepted_length", "tokens_per_second", "speed_up", "median_speed_up", "same_texts")
    rows = [
        (name, side, *(found[column] for column in columns))
        for name, sides in results.items()
        for side, found in sides.items()
    ]
    header = ("", "", "accepted length", "tokens/s", "speed-up", "median", f"same of {len(prompts)}")
    goals = [Goal("bfloat16: drafting over plain decoding, the best K", best, GOAL, ">=")]
    report("gain", hardware(ON_CPU), {"checkpoint": str(wanted.checkpoint), **results}, goals, [Table(header, rows)])


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a value makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    add("--data", type=Path, default=Path("runs/quickstart/data/corpus"), help="its .bin/.idx prefix")
    add("--method", default="mtp_eagle", help="of --speculative-config; default: mtp_eagle")
    add(
        "--counts",
        type=some_of(COUNTS),
        default=["2", "3", "5"],
        metavar="K,...",
        help="drafts a round; default: 2,3,5",
    )
    add("--texts", type=count, default=12, help="held-out texts; default: 12")
    add("--new-tokens", type=count, default=96, help="of each text; default: 96")
    add("--repeats", type=count, default=3, help="runs of each text; default: 3")
    add("--threads", type=count, default=2, help="default: 2")
    add("--quick", action="store_true", help="two short texts, once: whether it runs")
    wanted = parser.parse_args(argv)
    if not wanted.checkpoint.is_dir():
        parser.error(f"there is no {wanted.checkpoint}; make it with scripts/quickstart.sh, or give --checkpoint.")
    if wanted.quick:
        wanted.texts, wanted.new_tokens, wanted.repeats = 2, 8, 1
    return wanted


def gains(dtype: str, prompts: list[list[int]], wanted: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of `plain` and each `K=...`: tokens of a forward, tokens a second, speed-ups, texts that are plain decoding's."""
    runner = load_runner(wanted.checkpoint, dtype=getattr(torch, dtype))
    drafts = {
        f"K={n}": {"method": wanted.method, "num_speculative_tokens": n if n == AUTO else int(n)} for n in wanted.counts
    }
    seconds: dict[str, list[float]] = {side: [] for side in (PLAIN, *drafts)}
    stats: dict[str, list[AcceptanceStats]] = {side: [] for side in seconds}
    same = dict.fromkeys(seconds, 0)
    for prompt in tqdm(prompts, desc=dtype, unit="text"):
        made: dict[str, Generated] = {}
        sides = {
            side: partial(_continue, made, side, runner, prompt, wanted.new_tokens, drafts.get(side))
            for side in seconds
        }
        spent = interleave(sides, wanted.repeats, warm_up=1)
        for side, times in spent.items():
            seconds[side].append(statistics.median(one.wall for one in times))
            stats[side].append(made[side].stats)
        texts = {side: one.token_ids[0] for side, one in made.items()}
        if runner.dtype == torch.float32:
            check_tokens(dtype, texts, runner.dtype)
        for side, text in texts.items():
            same[side] += text == texts[PLAIN]
    return {
        side: {
            "accepted_length": merged(stats[side]).accepted_length,
            "tokens_per_second": wanted.new_tokens * len(prompts) / sum(seconds[side]),
            "speed_up": sum(seconds[PLAIN]) / sum(seconds[side]),
            "median_speed_up": statistics.median(a / b for a, b in zip(seconds[PLAIN], seconds[side], strict=True)),
            "same_texts": same[side],
        }
        for side in seconds
    }


def _continue(
    made: dict[str, Generated], side: str, runner: Runner, prompt: list[int], new_tokens: int, drafts: Any
) -> None:
    made[side] = generate(runner, [prompt], new_tokens, None, drafts)


if __name__ == "__main__":
    main()
