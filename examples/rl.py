"""GRPO with drafted rollouts, in six arms: which drafter follows a policy best, and with which loss?

    python examples/rl.py                                    five seeds of 60 steps; resumes an interrupted run
    python examples/rl.py --arms frozen eagle3               some of the arms
    python examples/rl.py --quick                            does it run? (the figures mean little)
    python examples/rl.py --plot runs/rl/results.json        plot again

The task is to sort seven digits, and the reward is the fraction of digits at the right place. `megatron-mtp train`
trains the policy that all arms start from, on answers of which a fourth is sorted, and a drafter of each kind on it.
The trainer's model is Megatron's `GPTModel` with the head attached by `attach`, as in a framework. Every step samples
answers with this package's engine, trains the policy and its head with Megatron's optimizer, and sends the new weights
to the engine. The head's loss has no gradient into the policy. The arms differ in the head and its training:

    frozen   an MTP layer that is not trained
    stale    an MTP layer that learns the policy's distribution (tv); the engine gets it every tenth step
    mtp-ce   an MTP layer that learns the sampled tokens
    mtp-tv   an MTP layer that learns the policy's distribution
    eagle3   an EAGLE-3 drafter with its default loss
    dspark   a DSpark drafter with its default loss

Writes results.json with the metrics of every step, and rl.png, to --out. Arms and seeds that are in results.json with
the same number of steps are not run again. The metrics are the mean reward, the policy's entropy in nats, the accepted
length (tokens per forward pass of the target), tokens per second of CPU time, which other load disturbs less than wall
time, and the largest difference between the log-probabilities of the engine and of the trainer, relative to values
above 1.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from megatron_mtp.checkpoint.convert.live_drafter import export_drafter_weights, load_drafter_weights
from megatron_mtp.checkpoint.model import fill
from megatron_mtp.common.files import written_beside
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.decoding.update_weights import update_weights
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model.specs import with_portable_modules
from megatron_mtp.model.stored_arguments import completed
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.parameter_group import get_mtp_optimizer

prepare()

ROOT = Path(__file__).resolve().parents[1]
DIGITS, BEGIN, SORT, END, VOCABULARY = 7, 10, 11, 12, 13
"""Digits of a prompt, and tokens after 0 .. 9: start and end of a prompt, and end of an answer."""

PROMPTS, GROUP = 16, 8
"""Prompts per step, and answers per prompt: an advantage compares a reward with its group (arXiv:2402.03300)."""

RUNNING = 16
"""Answers that the engine generates at once."""

DRAFTS = 3
"""Drafts per round."""

SHOWN = ("reward", "entropy", "accepted length", "tokens per CPU second")
"""Metrics that are plotted and printed."""

POLICY_LR, HEAD_LR, LAMBDA = 5e-4, 2e-3, 0.3


@dataclass(frozen=True)
class Arm:
    """A head and how it follows the policy.

    Attributes:
        method: the engine's drafting method.
        loss: what the head learns; None for the default loss of its kind.
        synced: steps between updates of the engine's head; 0 for never, if it is not trained.
        drafter: its settings; empty for an MTP layer.
    """

    method: str
    loss: str | None
    synced: int
    drafter: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> MTPConfig:
        """Return settings of the attached head."""
        loss = {} if self.loss is None else {"mtp_loss": self.loss}
        return MTPConfig(mtp_train_only=not self.drafter, **loss, **self.drafter)

    @property
    def flags(self) -> list[str]:
        """Return the flags that train the drafter before the first step."""
        return [part for name, value in self.drafter.items() for part in (f"--{name.replace('_', '-')}", str(value))]


ARMS = {
    "frozen": Arm("mtp_eagle", None, 0),
    "stale": Arm("mtp_eagle", "tv", 10),
    "mtp-ce": Arm("mtp_eagle", "ce", 1),
    "mtp-tv": Arm("mtp_eagle", "tv", 1),
    "eagle3": Arm("eagle3", None, 1, {"drafter": "eagle3", "drafter_steps": DRAFTS}),
    "dspark": Arm("dspark", None, 1, {"drafter": "dspark", "drafter_steps": DRAFTS, "drafter_num_layers": 1}),
}


def prompt_of(digits: list[int]) -> list[int]:
    return [BEGIN, *digits, SORT]


def reward(prompt: list[int], answer: list[int]) -> float:
    """Return the fraction of digits that are at the right place of the sorted list."""
    right = sorted(prompt[1:-1])
    return sum(one == other for one, other in zip(answer[:DIGITS], right, strict=False)) / DIGITS


TRAINING = (
    "--seq-length 128 --micro-batch-size 16 --global-batch-size 16 --lr 2e-3 --lr-warmup-iters 20 --split 95,5,0 "
    "--eval-interval 1000 --eval-iters 1 --num-workers 0 --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY} "
).split()
POLICY = (
    "--num-layers 4 --hidden-size 96 --num-attention-heads 4 --max-position-embeddings 128 --position-embedding-type "
    "rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --mtp-num-layers 1"
).split()


def make_start(out: Path, iterations: int) -> Path:
    """Train the policy with an MTP layer, once: a fourth of its training answers is sorted, others are not."""
    if not Path(f"{out}/digits.idx").is_file():
        draw = random.Random(0)
        out.mkdir(parents=True, exist_ok=True)
        corpus = IndexedDatasetBuilder(f"{out}/digits.bin")
        for _ in range(20_000):
            digits = [draw.randrange(10) for _ in range(DIGITS)]
            answer = draw.choice([sorted(digits), digits, digits[::-1], draw.sample(digits, DIGITS)])
            row = torch.tensor([*prompt_of(digits), *answer, END])
            corpus.add_document(row, [len(row)])
        corpus.finalize(f"{out}/digits.idx")
    return trained(out, out / "start", POLICY, iterations)


def trained(out: Path, folder: Path, flags: list[str], iterations: int) -> Path:
    """Return a checkpoint of `megatron-mtp train`, trained once."""
    if not (folder / "latest_checkpointed_iteration.txt").is_file():
        length = ["--train-iters", iterations, "--save-interval", iterations, "--save", folder]
        command = [sys.executable, ROOT / "pretrain_gpt.py", *flags, *TRAINING, *length, "--data-path", out / "digits"]
        subprocess.run([*map(str, command)], check=True)
    return folder


def start_of(arm: Arm, out: Path, start: Path, iterations: int) -> Path:
    """Return the start checkpoint of an arm: the policy, with its drafter instead of the MTP layer."""
    if not arm.drafter:
        return start
    flags = ["--use-checkpoint-args", "--load", str(start), *arm.flags]
    return trained(out, out / f"start-{arm.method}", flags, iterations)


class Trainer:
    """The policy and its head in Megatron's wrappers, trained by steps of GRPO."""

    def __init__(self, arm: Arm, start: Path, runner: Runner) -> None:
        self.arm, reader = arm, DistReader(start)
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints all arguments
            self.args = completed(reader.common()["args"])
        config = gpt_config_from_args(self.args)
        config.transformer_layer_spec = with_portable_modules(default_layer_spec(config, None), config.transformer)
        config.transformer.persist_layer_norm = False  # it needs Apex
        if arm.drafter:
            config.transformer.mtp_num_layers = None  # Megatron's builder has no drafters
        model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).train()
        fill(model, reader)
        self.attached = attach(model, settings=arm.settings, true_vocab_size=VOCABULARY)
        if arm.drafter:
            load_drafter_weights(model, export_drafter_weights(runner.model))
        self.model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        optimizer = OptimizerConfig(optimizer="adam", lr=POLICY_LR, weight_decay=0.0, clip_grad=1.0)
        self.optimizer = get_mtp_optimizer(optimizer, [self.model], lr=HEAD_LR, clip_grad=1.0)

    def step(self, rollouts: list["Rollout"]) -> dict[str, float]:
        """Train on the rollouts; return the policy's entropy, and the largest difference from the engine's values."""
        length = max(len(one.tokens) for one in rollouts)
        tokens_BS = torch.tensor([one.tokens + [END] * (length - len(one.tokens)) for one in rollouts])
        start, end_B1 = DIGITS + 2, torch.tensor([[len(one.tokens)] for one in rollouts])
        slots_S = torch.arange(length)
        mask_BS = ((slots_S + 1 >= start) & (slots_S + 1 < end_B1)).float()  # position i counts if token i + 1 does
        positions_BS = slots_S.expand_as(tokens_BS)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        logits_BSV = self.model(tokens_BS, positions_BS, None)
        logits_BSV = logits_BSV[:, :-1, :VOCABULARY]  # the remaining columns are vocabulary padding
        every_BSV, counts_BS = logits_BSV.log_softmax(-1), mask_BS[:, :-1]
        logprobs_BS = every_BSV.gather(-1, tokens_BS[:, 1:, None])[..., 0] * counts_BS
        loss = -(_advantages(rollouts) * logprobs_BS).sum() / mask_BS.sum()
        if self.arm.synced:
            loss = loss + LAMBDA * self.attached.loss(tokens_BS, None, mask_BS, normalizer=mask_BS.sum()).loss
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        theirs = torch.tensor([value for one in rollouts for value in one.logprobs])
        apart = (logprobs_BS[counts_BS > 0].detach() - theirs) / theirs.abs().clamp(min=1)
        entropy_BS = -(every_BSV.exp() * every_BSV).sum(-1) * counts_BS
        return {
            "entropy": float(entropy_BS.sum() / counts_BS.sum()),
            "log-probabilities apart": float(apart.abs().max()),
        }

    def send_weights(self, engine: Engine, with_head: bool) -> None:
        """Give the engine the policy's weights, and those of the head."""
        layer = f"model.layers.{self.args.num_layers}."
        pairs = export_hf_weights(self.model, self.args)
        kept = ((name, value) for name, value in pairs if with_head or not name.startswith(layer))
        drafter = export_drafter_weights(self.model) if self.arm.drafter and with_head else None
        update_weights(engine, kept, drafter=drafter)


class Rollout:
    """An answer that the engine sampled, with the target's log-probabilities of its tokens."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.tokens, self.logprobs = prompt, list(prompt), list[float]()

    @property
    def reward(self) -> float:
        return reward(self.prompt, self.tokens[len(self.prompt) :])


def _advantages(rollouts: list[Rollout]) -> Tensor:
    """Return rewards relative to the other answers to the same prompt, [B, 1]."""
    rewards_PG = torch.tensor([one.reward for one in rollouts]).view(PROMPTS, GROUP)
    spread_P1 = rewards_PG.std(1, keepdim=True) + 1e-4
    return ((rewards_PG - rewards_PG.mean(1, keepdim=True)) / spread_P1).view(-1, 1)


def sample(engine: Engine, prompts: list[list[int]], seed: int) -> list[Rollout]:
    """Return `GROUP` answers to every prompt."""
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


def run(arm: Arm, start: Path, steps: int, seed: int, name: str) -> list[dict[str, float]]:
    """Run one arm and return the metrics of every step."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    method = config_from({"method": arm.method, "num_speculative_tokens": DRAFTS})
    runner = load_runner(start, config=method)
    trainer = Trainer(arm, start, runner)
    engine = Engine(runner, EngineSettings(running=RUNNING, waiting=PROMPTS * GROUP), method)
    figures = []
    for step in tqdm(range(steps), desc=f"{name}, seed {seed}", file=sys.stderr):
        prompts = [prompt_of([draw.randrange(10) for _ in range(DIGITS)]) for _ in range(PROMPTS)]
        before, began = engine.stats, time.process_time()
        rollouts = sample(engine, prompts, seed * steps + step)
        seconds = time.process_time() - began
        made = sum(len(one.tokens) - len(one.prompt) for one in rollouts)
        forwards = engine.stats.target_forwards - before.target_forwards
        learned = trainer.step(rollouts)
        trainer.send_weights(engine, with_head=arm.synced > 0 and (step + 1) % arm.synced == 0)
        figures.append(
            {
                "reward": statistics.mean(one.reward for one in rollouts),
                "accepted length": made / forwards,
                "tokens per CPU second": made / seconds,
                **learned,
            }
        )
    return figures


def kept(file: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Return the seeds of every arm that an earlier run has finished with as many steps."""
    earlier = json.loads(file.read_text()) if file.is_file() else {}
    return {arm: {seed: made for seed, made in earlier.get(arm, {}).items() if len(made) == steps} for arm in ARMS}


def plot(results: dict[str, Any], file: Path) -> None:
    """Plot metrics by step; a line is the mean over seeds, and a band its standard error."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SHOWN), figsize=(16, 4))
    for axis, name in zip(axes, SHOWN, strict=True):
        for arm, seeds in results.items():
            curves = [[step[name] for step in steps] for steps in seeds.values()]
            columns = list(zip(*curves, strict=True))
            means, errors = [*map(statistics.mean, columns)], [*map(standard_error, columns)]
            (line,) = axis.plot(means, label=arm)
            low, high = zip(*((mean - e, mean + e) for mean, e in zip(means, errors, strict=True)), strict=True)
            axis.fill_between(range(len(columns)), low, high, color=line.get_color(), alpha=0.2)
        axis.set(xlabel="step", title=name)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def summary(results: dict[str, Any]) -> list[str]:
    """Return a line per arm: means over the first and last fifth of its steps, the latter with its error over seeds."""
    lines = []
    for arm, seeds in results.items():
        told = []
        for name in SHOWN:
            fifth = max(1, len(next(iter(seeds.values()))) // 5)
            first, last = (
                [statistics.mean(step[name] for step in steps[part]) for steps in seeds.values()]
                for part in (slice(fifth), slice(-fifth, None))
            )
            error = standard_error(last)
            told.append(f"{name} {statistics.mean(first):.3g} -> {statistics.mean(last):.3g} +- {error:.1g}")
        apart = max(step["log-probabilities apart"] for steps in seeds.values() for step in steps)
        lines.append(f"{arm:7} {', '.join(told)}, log-probabilities at most {apart:.1e} apart")
    return lines


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def main() -> None:
    first, rest = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="two steps of one seed, after a short pre-training")
    parser.add_argument("--out", type=Path, default=Path("runs/rl"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw these results, and run nothing")
    given = parser.parse_args()
    if given.plot is not None:
        results = json.loads(given.plot.read_text())
    else:
        if given.quick:
            given.steps, given.seeds, given.out = 2, [0], given.out / "quick"
        iterations, file = 60 if given.quick else 400, given.out / "results.json"
        policy = make_start(given.out, iterations)
        starts = {name: start_of(ARMS[name], given.out, policy, iterations) for name in given.arms}
        results = kept(file, given.steps)
        for seed in given.seeds:  # arm by arm, so that other load affects all of them
            for name, start in starts.items():
                seeds = results[name]
                if str(seed) not in seeds:
                    seeds[str(seed)] = run(ARMS[name], start, given.steps, seed, name)
                    with written_beside(file) as beside:
                        beside.write_text(json.dumps(results))
    results = {arm: seeds for arm, seeds in results.items() if seeds}
    plot(results, given.out / "rl.png")
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
