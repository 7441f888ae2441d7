"""What drafting gains: acceptance on a trained model, and speed against plain decoding and against transformers.

    python studies/drafting.py                         runs/quickstart/checkpoint and a model of 120 M parameters
    python studies/drafting.py --part acceptance       what the methods accept on the trained model's held-out text
    python studies/drafting.py --part speed            float32 and bfloat16, batch 1 and 8
    python studies/drafting.py --quick                 does it run? (the figures mean nothing)

Prompts are windows of the documents that training left out. Both sides of a comparison run the same weights (ours are
exported) and take turns, run by run; a ratio is the median of those within a round. In float32 drafting has to emit
what plain decoding does, or the benchmark ends with an error; where two sides part, it says after how many tokens.

Run at 5a85132 (acceptance) and 1c8f248 (speed).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from benchmarks.harness import Goal, count, hardware, report
from megatron_mtp.drafting import load_runner
from megatron_mtp.model.build import join_world
from megatron_mtp.platform import prepare
from studies.accepted import Trained, acceptance, accepted_table
from studies.speeds import FULL, QUICK, speeds

ON_CPU = prepare()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    parser.add_argument("--data", type=Path, default=Path("runs/quickstart/data/corpus"), help="its .bin/.idx prefix")
    parser.add_argument("--part", choices=["acceptance", "speed", "all"], default="all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=count, default=2)
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
        results["acceptance"], found = acceptance(Trained(load_runner(args.checkpoint), prompts, scale.new_tokens))
        goals += found
    if args.part != "acceptance":
        results["speed"], found = speeds(args.checkpoint, prompts, scale)
        goals += found
    tables = [accepted_table(results["acceptance"])] if "acceptance" in results else []
    report("drafting", hardware(ON_CPU), results, goals, tables)


def held_out(prefix: Path, count: int, length: int) -> list[list[int]]:
    """Windows of the last 2 % of the documents, which `--split 98,2,0` left out."""
    data = IndexedDataset(str(prefix))
    documents = len(data)
    long = [number for number in range(int(0.98 * documents), documents) if data.sequence_lengths[number] > 4 * length]
    step = max(len(long) // count, 1)
    return [data[number][length : 2 * length].tolist() for number in long[::step][:count]]


if __name__ == "__main__":
    main()
