"""GRPO with rollouts drafted by MTP layers, in three arms: a frozen head, a stale head, and a head that follows.

    python examples/rl.py                                    three seeds of 60 steps; a run that was cut off goes on
    python examples/rl.py --quick                            does it run? (the figures mean little)
    python examples/rl.py --plot runs/rl/results.json        the plot again

The task is to sort seven digits, and the reward the share of digits in their place. `megatron-mtp train` makes the
policy that all arms start from, on answers of which a fourth is sorted. The trainer's model is Megatron's `GPTModel`
with Megatron's MTP block, to which `attach` is attached, as in a framework. Every step samples answers with this
package's engine, trains the policy with Megatron's optimizer, and gives the engine the new weights. The MTP layers

    frozen   stay as they are
    stale    learn the policy's distribution (kd), without a gradient into it; the engine gets them every tenth step
    trained  learn it too, and the engine gets them at every step

Written to --out: results.json with the figures of every step, and rl.png. Arms and seeds of as many steps that are in
results.json are not run again. The figures are the mean reward, the accepted length (tokens per forward of the target),
tokens per second of CPU time, which other programs disturb less than the clock's, and the largest difference between
the log-probabilities of the engine and of the trainer's forward, relative to their size where that is above 1.

Letters in names: B rollouts, S positions, V vocabulary, P prompts, G rollouts of a prompt.
"""

import argparse
import contextlib
import io
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor
from tqdm import tqdm

from megatron_mtp.attach import attach
from megatron_mtp.checkpoint.convert.live import export_hf_weights
from megatron_mtp.checkpoint.model import fill
from megatron_mtp.common.files import written_beside
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.decoding.update_weights import update_weights
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model.arguments import completed
from megatron_mtp.model.specs import with_portable_modules
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.parameter_group import get_mtp_optimizer

prepare()

ROOT = Path(__file__).resolve().parents[1]
DIGITS, BEGIN, SORT, END, VOCABULARY = 7, 10, 11, 12, 13
"""Digits of a prompt, and the tokens behind 0 .. 9: a prompt's beginning and end, and an answer's end."""

PROMPTS, GROUP = 16, 8
"""Prompts of a step, and answers to each: an advantage is a reward against those of its group (arXiv:2402.03300)."""

RUNNING = 16
"""Answers that the engine writes at once."""

SYNCED = {"frozen": 0, "stale": 10, "trained": 1}
"""After how many steps an arm gives the engine its MTP layers; 0 for never, since they are not trained."""

DRAFTS = 2
"""Drafts a round."""

POLICY_LR, MTP_LR, LAMBDA = 5e-4, 2e-3, 0.3


def prompt_of(digits: list[int]) -> list[int]:
    return [BEGIN, *digits, SORT]


def reward(prompt: list[int], answer: list[int]) -> float:
    """The share of digits that stand where they do in the sorted list."""
    right = sorted(prompt[1:-1])
    return sum(one == other for one, other in zip(answer[:DIGITS], right, strict=False)) / DIGITS


def make_start(folder: Path, iterations: int) -> Path:
    """A checkpoint of `megatron-mtp train`, made once: a fourth of its answers is sorted, others repeat or shuffle."""
    if (folder / "latest_checkpointed_iteration.txt").is_file():
        return folder
    draw = random.Random(0)
    folder.parent.mkdir(parents=True, exist_ok=True)
    corpus = IndexedDatasetBuilder(f"{folder.parent}/digits.bin")
    for _ in range(20_000):
        digits = [draw.randrange(10) for _ in range(DIGITS)]
        answer = draw.choice([sorted(digits), digits, digits[::-1], draw.sample(digits, DIGITS)])
        row = torch.tensor([*prompt_of(digits), *answer, END])
        corpus.add_document(row, [len(row)])
    corpus.finalize(f"{folder.parent}/digits.idx")
    flags = (
        "--num-layers 4 --hidden-size 96 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
        "--attention-dropout 0 --untie-embeddings-and-output-weights --mtp-num-layers 1 --micro-batch-size 16 "
        "--global-batch-size 16 --lr 2e-3 --lr-warmup-iters 20 --eval-interval 1000 --eval-iters 1 --split 95,5,0 "
        f"--train-iters {iterations} --save-interval {iterations} --num-workers 0 --tokenizer-type NullTokenizer "
        f"--vocab-size {VOCABULARY} --data-path {folder.parent / 'digits'} --save {folder}"
    )
    subprocess.run([sys.executable, ROOT / "pretrain_gpt.py", *flags.split()], check=True)
    return folder


def megatrons_model(start: Path) -> Any:
    """The checkpoint's model as Megatron builds it, with its MTP block."""
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints all arguments
        args = completed(DistReader(start).common()["args"])
    config = gpt_config_from_args(args)
    config.transformer_layer_spec = with_portable_modules(default_layer_spec(config, None), config.transformer)
    config.transformer.persist_layer_norm = False  # of Apex
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    fill(model, DistReader(start))
    return model


class Trainer:
    """The policy and its MTP layers in Megatron's wrappers, one step of GRPO at a time."""

    def __init__(self, start: Path) -> None:
        self.args = DistReader(start).common()["args"]
        model = megatrons_model(start).train()
        self.attached = attach(model, settings=MTPConfig(mtp_train_only=True, mtp_loss="kd"))
        self.model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        config = OptimizerConfig(optimizer="adam", lr=POLICY_LR, weight_decay=0.0, clip_grad=1.0)
        self.optimizer = get_mtp_optimizer(config, [self.model], lr=MTP_LR, clip_grad=1.0)

    def step(self, rollouts: list["Rollout"], trains_mtp: bool) -> float:
        """Train on the rollouts; returns the largest difference of a log-probability from the engine's."""
        length = max(len(one.tokens) for one in rollouts)
        tokens_BS = torch.tensor([one.tokens + [END] * (length - len(one.tokens)) for one in rollouts])
        start, end_B1 = DIGITS + 2, torch.tensor([[len(one.tokens)] for one in rollouts])
        slots_S = torch.arange(length)
        mask_BS = ((slots_S + 1 >= start) & (slots_S + 1 < end_B1)).float()  # position i counts where token i + 1 does
        positions_BS = slots_S.expand_as(tokens_BS)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        logits_BSV = self.model(tokens_BS, positions_BS, None)
        logits_BSV = logits_BSV[:, :-1, :VOCABULARY]  # the rows behind pad the vocabulary, and stand for no token
        logprobs_BS = logits_BSV.log_softmax(-1).gather(-1, tokens_BS[:, 1:, None])[..., 0] * mask_BS[:, :-1]
        loss = -(_advantages(rollouts) * logprobs_BS).sum() / mask_BS.sum()
        if trains_mtp:
            loss = loss + LAMBDA * self.attached.loss(tokens_BS, None, mask_BS, normalizer=mask_BS.sum()).loss
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        theirs = torch.tensor([value for one in rollouts for value in one.logprobs])
        return float(((logprobs_BS[mask_BS[:, :-1] > 0].detach() - theirs) / theirs.abs().clamp(min=1)).abs().max())


class Rollout:
    """An answer that the engine sampled, with the target's log-probabilities of its tokens."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.tokens, self.logprobs = prompt, list(prompt), list[float]()

    @property
    def reward(self) -> float:
        return reward(self.prompt, self.tokens[len(self.prompt) :])


def _advantages(rollouts: list[Rollout]) -> Tensor:
    """[B, 1], rewards against those of the other answers to the same prompt."""
    rewards_PG = torch.tensor([one.reward for one in rollouts]).view(PROMPTS, GROUP)
    spread_P1 = rewards_PG.std(1, keepdim=True) + 1e-4
    return ((rewards_PG - rewards_PG.mean(1, keepdim=True)) / spread_P1).view(-1, 1)


def sample(engine: Engine, prompts: list[list[int]], seed: int) -> list[Rollout]:
    """Answers to every prompt, `GROUP` each."""
    rollouts = {}
    for number, prompt in enumerate(prompt for prompt in prompts for _ in range(GROUP)):
        request = Request(
            prompt, DIGITS + 1, Sampling(1.0), seed * 10_000 + number, stop_ids=frozenset([END]), logprobs=0
        )
        rollouts[engine.add(request)] = Rollout(prompt)
    while engine.busy:
        for update in engine.step():
            rollouts[update.request].tokens += update.tokens
            rollouts[update.request].logprobs += [one.logprob for one in update.logprobs]
    return list(rollouts.values())


def run(arm: str, start: Path, steps: int, seed: int) -> list[dict[str, float]]:
    """The figures of every step of one arm."""
    torch.manual_seed(seed)
    draw, every = random.Random(seed), SYNCED[arm]
    runner, trainer = load_runner(start), Trainer(start)  # the runner's model joins the world of one process
    method = {"method": "mtp_eagle", "num_speculative_tokens": DRAFTS}
    head = f"model.layers.{trainer.args.num_layers}."
    settings = EngineSettings(running=RUNNING, waiting=PROMPTS * GROUP)
    engine = Engine(runner, settings, config_from(method))
    figures = []
    for step in tqdm(range(steps), desc=f"{arm}, seed {seed}", file=sys.stderr):
        prompts = [prompt_of([draw.randrange(10) for _ in range(DIGITS)]) for _ in range(PROMPTS)]
        before, began = engine.stats, time.process_time()
        rollouts = sample(engine, prompts, seed * steps + step)
        seconds = time.process_time() - began
        made = sum(len(one.tokens) - len(one.prompt) for one in rollouts)
        forwards = engine.stats.target_forwards - before.target_forwards
        apart = trainer.step(rollouts, trains_mtp=every > 0)
        with_head = every > 0 and (step + 1) % every == 0
        pairs = export_hf_weights(trainer.model, trainer.args)
        update_weights(engine, ((name, value) for name, value in pairs if with_head or not name.startswith(head)))
        figures.append(
            {
                "reward": statistics.mean(one.reward for one in rollouts),
                "accepted length": made / forwards,
                "tokens per CPU second": made / seconds,
                "log-probabilities apart": apart,
            }
        )
    return figures


def kept(file: Path, steps: int) -> dict[str, dict[str, Any]]:
    """The seeds of every arm that an earlier run has finished with as many steps."""
    earlier = json.loads(file.read_text()) if file.is_file() else {}
    return {arm: {seed: made for seed, made in earlier.get(arm, {}).items() if len(made) == steps} for arm in SYNCED}


def plot(results: dict[str, Any], file: Path) -> None:
    """Reward, accepted length and tokens per CPU second by step; a line is the mean over seeds, a band all of them."""
    import matplotlib.pyplot as plt

    names = ["reward", "accepted length", "tokens per CPU second"]
    figure, axes = plt.subplots(1, len(names), figsize=(13, 4))
    for axis, name in zip(axes, names, strict=True):
        for arm, seeds in results.items():
            curves = [[step[name] for step in steps] for steps in seeds.values()]
            columns = list(zip(*curves, strict=True))
            axis.plot([statistics.mean(column) for column in columns], label=arm)
            axis.fill_between(range(len(columns)), *zip(*((min(c), max(c)) for c in columns), strict=True), alpha=0.2)
        axis.set(xlabel="step", title=name)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def summary(results: dict[str, Any]) -> list[str]:
    """A line for every arm, of the first and last fifth of its steps."""
    lines = []
    for arm, seeds in results.items():
        told = []
        for name in ("reward", "accepted length", "tokens per CPU second"):
            ends = []
            for part in (0, 1):
                values = [
                    step[name]
                    for steps in seeds.values()
                    for fifth in [max(1, len(steps) // 5)]
                    for step in (steps[-fifth:] if part else steps[:fifth])
                ]
                ends.append(statistics.mean(values))
            told.append(f"{name} {ends[0]:.3g} -> {ends[1]:.3g}")
        apart = max(step["log-probabilities apart"] for steps in seeds.values() for step in steps)
        lines.append(f"{arm:7} {', '.join(told)}, log-probabilities at most {apart:.1e} apart")
    return lines


def main() -> None:
    first, rest = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="two steps of one seed, after a short pre-training")
    parser.add_argument("--out", type=Path, default=Path("runs/rl"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw these results, and run nothing")
    given = parser.parse_args()
    if given.plot is not None:
        results = json.loads(given.plot.read_text())
    else:
        if given.quick:
            given.steps, given.seeds, given.out = 2, [0], given.out / "quick"
        start, file = make_start(given.out / "start", iterations=60 if given.quick else 400), given.out / "results.json"
        results = kept(file, given.steps)
        for seed in given.seeds:  # arm by arm, so that what else the machine does meets all of them
            for arm, seeds in results.items():
                if str(seed) not in seeds:
                    seeds[str(seed)] = run(arm, start, given.steps, seed)
                    with written_beside(file) as beside:
                        beside.write_text(json.dumps(results))
    plot(results, given.out / "rl.png")
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
