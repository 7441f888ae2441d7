"""Training on this device: parity with the CPU, including FP8, and cost compared with Megatron's own MTP."""

import json
from pathlib import Path

from benchmarks.gpu.lines import CPU
from benchmarks.gpu.part import ROOT, Command, Setting
from benchmarks.harness import Found, Goal, Table
from megatron_mtp.megatron.machine import transformer_engine_works

TRAINED = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0"
)
"""Sizes that are divisible into FP8 blocks."""
APART = 4e-2
"""Largest difference in nats between two bfloat16 trainings; on a CPU each stays within a fifth of it of float32."""

FIRST, SAME = "loss and gradient norm of the first step", 3e-2
"""The names in train_step.py, and the largest relative difference from Megatron in bfloat16."""

OTHER_STATE = "--dist-ckpt-strictness log_all"
"""The CPU's checkpoint has no state of TE's modules."""

GATHERED = "--fp8-param-gather --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def parity(setting: Setting, depths: int = 2, flags: str = "", device_flags: str = "", drafter: str = "") -> Found:
    """Train the same steps in bfloat16 on this device, with the modules of the part's line, and on the CPU.

    Args:
        flags: flags of both sides, and of weight initialization.
        device_flags: flags only for this device.
        drafter: flags of both sides, but not of weight initialization.
    """
    return compared(setting, {"device": f"{drafter} {device_flags}"}, drafter, depths, flags, APART)


def eight_bits(setting: Setting, recipe: str, form: str) -> Found:
    """Train in FP8, with weights in bfloat16 and in FP8; the CPU trains in bfloat16."""
    flags = f"--fp8-recipe {recipe} --fp8-format {form}"
    return compared(setting, {"FP8": flags, "FP8, weights too": f"{flags} {GATHERED}"}, "", 2, "", 4 * APART)


def compared(setting: Setting, sides: dict[str, str], on_cpu: str, depths: int, flags: str, allowed: float) -> Found:
    """Compare losses of trunk and MTP layers, step by step, on sides with different flags, from weights drawn on the
    CPU.
    """
    steps = 2 if setting.quick else 50
    both = f"{TRAINED} {flags} " + (f"--mtp-num-layers {depths}" if depths else "")
    begin_at = saved(setting, both, 1, CPU)
    both += f" --train-iters {steps} --load {begin_at} --finetune --bf16"
    other_state = OTHER_STATE if transformer_engine_works() else ""
    started = {"CPU": trained(setting, "cpu", f"{both} {on_cpu}", CPU)}
    for number, (name, own) in enumerate(sides.items()):
        started[name] = trained(setting, str(number), f"{both} {own} {other_state}")
    learned, failed = {}, {}
    for name, (command, metrics) in started.items():  # wait for all, so that none disturbs later parts
        try:
            command.printed(setting.left)
            learned[name] = losses_of(metrics)
        except RuntimeError as error:
            failed[name] = str(error)
    found = of_steps(setting.name, learned, steps, allowed, failed)
    setting.keep(found)
    if failed:
        raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    return found


def saved(setting: Setting, flags: str, steps: int, line: str | None = None) -> Path:
    """Return a checkpoint after this many steps."""
    folder = setting.folder / "saved"
    setting.run("save", pretrain(f"{flags} --train-iters {steps} --save-interval {steps} --save {folder}"), line)
    return folder


def trained(setting: Setting, name: str, flags: str, line: str | None = None) -> tuple[Command, Path]:
    """Return a started training, and the folder of its metrics."""
    metrics = setting.folder / name
    return setting.start(name, pretrain(f"{flags} --mtp-metrics-dir {metrics}"), line), metrics


def pretrain(flags: str) -> list[str]:
    return [str(ROOT / "pretrain_gpt.py"), *flags.split()]


def of_steps(part: str, learned: "dict[str, Steps]", steps: int, allowed: float, failed: dict[str, str]) -> Found:
    """Return how far each finished side is from the CPU."""
    apart = {name: distance(learned[name], learned["CPU"]) for name in learned if name != "CPU" and "CPU" in learned}
    logged = list(next(iter(learned.values()))[steps]) if learned else []
    last = [(name, *learned[name][steps].values(), apart.get(name)) for name in learned]
    return Found(
        {"steps": steps, "largest distance from the CPU": apart},
        [Goal(f"{part}: nats between CPU and {name}, {steps} steps", far, allowed) for name, far in apart.items()],
        [Table(f"{part}: bfloat16 training, step {steps}", ("side", *logged, "largest distance from the CPU"), last)],
        failed,
    )


Steps = dict[int, dict[str, float]]
"""Losses by step and name."""


def losses_of(folder: Path) -> Steps:
    """Return losses of the trunk and of every depth or draft."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        row["iteration"]: {name: value for name, value in row.items() if name.endswith(" loss")}
        for row in rows
        if row["split"] == "training"
    }


def distance(ours: Steps, theirs: Steps) -> float:
    """Return the largest difference of any loss at any step; NaN if one is NaN, which meets no goal."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"steps {sorted(ours)} against {sorted(theirs)}")
    differences = [abs(ours[step][name] - loss) for step, losses in theirs.items() for name, loss in losses.items()]
    return next((each for each in differences if each != each), max(differences))


def benchmark(setting: Setting, script: str, flags: str, quick: str, short: str = "") -> Found:
    """Run another benchmark with `flags` and return its report; add `quick` in a quick run, `short` in a short one."""
    own = f"--quick {quick}" if setting.quick else short if setting.short else flags
    return Found.of(json.loads(setting.run(script, [ROOT / "benchmarks" / script, *own.split()]).splitlines()[-1]))


def first_step(setting: Setting, **given: str) -> Found:
    """Run only the first step of a training benchmark: other parts run at the same time, so times mean nothing."""
    first = benchmark(setting, **given).results[FIRST]
    rows, goals = [], []
    for depths, sides in first.items():
        (ours, own), (theirs, megatrons) = sides.values()
        apart = abs(ours - theirs) / abs(theirs), abs(own - megatrons) / abs(megatrons)
        rows += [(depths, side, *figures) for side, figures in sides.items()]
        for what, far in zip(("loss", "gradient norm"), apart, strict=True):
            goals.append(Goal(f"{setting.name}: {what} apart from Megatron's own MTP, {depths}", far, SAME))
    return Found({FIRST: first}, goals, [Table("A first step", ("depths", "side", "loss", "gradient norm"), rows)])
