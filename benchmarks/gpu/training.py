"""Training on this device: parity with the CPU, Transformer Engine, FP8, experts, and costs beside Megatron's."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.part import ROOT, Found, Setting, Table, finish, start
from benchmarks.harness import Goal
from megatron_mtp.model.arguments import TE, flags_without
from megatron_mtp.runtime import why_not

TRAINED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --lr 5e-3 --mtp-num-layers 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0"
).split()
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
APART = 4e-2
"""Nats between two trainings in bfloat16; each stays within half of it of the one in float32 (test_precision.py)."""


OTHER_STATE = ["--dist-ckpt-strictness", "log_all"]
"""The CPU has saved no state of TE's modules."""

EIGHT = "--fp8-format hybrid --fp8-recipe tensorwise"


def parity(setting: Setting) -> Found:
    """The same steps in bfloat16 on this device, with Megatron's own modules, and on the CPU."""
    without_te = flags_without(TE) if why_not("transformer_engine.pytorch") is None else []
    return compared(setting, {"CPU": ([], NO_GPU), "device": (without_te, {})}, APART)


def te_parity(setting: Setting) -> Found:
    """With Transformer Engine's modules."""
    return compared(setting, {"CPU": ([], NO_GPU), "with TE": (OTHER_STATE, {})}, APART)


def te_fp8(setting: Setting) -> Found:
    """In FP8, with weights in bfloat16 and in FP8; the CPU trains in bfloat16."""
    gathered = "--fp8-param-gather --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
    sides: Sides = {
        "CPU": ([], NO_GPU),
        "FP8": ([*OTHER_STATE, *EIGHT.split()], {}),
        "FP8, weights too": ([*OTHER_STATE, *EIGHT.split(), *gathered], {}),
    }
    return compared(setting, sides, 4 * APART)


def te_moe(setting: Setting) -> Found:
    """Experts trained with Transformer Engine draft the text of plain decoding."""
    saved, log = setting.folder / "moe", setting.folder / "moe.log"
    trained = pretrain(*EXPERTS, "--train-iters", "4", "--save-interval", "4", "--save", str(saved))
    finish(start(trained, log), log, setting.left)
    texts = {count: drafted(setting, saved, count) for count in (0, 2)}
    same = texts[0] == texts[2]
    return Found(
        {"same text": same, "tokens": len(texts[0].split())},
        [Goal("te_moe: texts of K = 2 that differ from plain decoding, float32", int(not same), 0)],
        [Table("A MoE trained with TE", ("K", "tokens"), list(texts.items()))],
    )


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type alltoall"
).split()


def drafted(setting: Setting, saved: Path, count: int) -> str:
    """The text's tokens, as generate prints them without a tokenizer."""
    log = setting.folder / f"generate-{count}.log"
    words = f"--prompt-ids 5,6,7,8 --max-new-tokens 24 --load {saved}".split()
    if count:
        words += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": count})]
    printed = finish(start([sys.executable, str(ROOT / "generate_gpt.py"), *words], log), log, setting.left)
    return next(line for line in printed.splitlines() if line[:1].isdigit() or line.startswith("["))


Sides = dict[str, tuple[list[str], dict[str, str]]]


def compared(setting: Setting, sides: Sides, allowed: float) -> Found:
    """Losses of trunk and depths, step by step, from weights that the CPU drew; the first side is the CPU."""
    steps, begin_at = 2 if setting.quick else 50, setting.folder / "start"
    log = setting.folder / "start.log"
    drawn = pretrain("--train-iters", "1", "--save-interval", "1", "--save", str(begin_at))
    finish(start(drawn, log, **NO_GPU), log, setting.left)
    flags = ["--train-iters", str(steps), "--load", str(begin_at), "--finetune", "--bf16"]
    started = {}
    for number, (name, (own, environment)) in enumerate(sides.items()):
        command = pretrain(*flags, *own, "--mtp-metrics-dir", str(setting.folder / str(number)))
        started[name] = start(command, setting.folder / f"{number}.log", **environment)
    learned, failed = {}, {}
    for number, (name, process) in enumerate(started.items()):  # all come to their end, and disturb nothing later
        try:
            finish(process, setting.folder / f"{number}.log", setting.left)
            learned[name] = losses_of(setting.folder / str(number))
        except RuntimeError as error:
            failed[name] = str(error)
    found = of_steps(learned, steps, allowed, failed)
    setting.keep(found)
    if failed:
        raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    return found


def of_steps(learned: "dict[str, Steps]", steps: int, allowed: float, failed: dict[str, str]) -> Found:
    """The distances of all sides from the CPU, which came to their end."""
    apart = {name: distance(learned[name], learned["CPU"]) for name in learned if name != "CPU" and "CPU" in learned}
    last = [(name, *(learned[name][steps][key] for key in LOGGED), apart.get(name)) for name in learned]
    return Found(
        {"steps": steps, "largest distance from the CPU": apart},
        [Goal(f"nats between CPU and {name}, {steps} steps of bfloat16", far, allowed) for name, far in apart.items()],
        [Table(f"bfloat16 training, step {steps}", ("side", *LOGGED, "largest distance from the CPU"), last)],
        failed,
    )


Steps = dict[int, dict[str, float]]
LOGGED = ("lm loss", "mtp_1 loss", "mtp_2 loss")


def pretrain(*flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "pretrain_gpt.py"), *TRAINED, *flags]


def losses_of(folder: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: {name: row[name] for name in LOGGED} for row in rows if row["split"] == "training"}


def distance(ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]]) -> float:
    """The largest difference of any loss at any step; NaN where one is, which meets no goal."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"steps {sorted(ours)} against {sorted(theirs)}")
    differences = [abs(ours[step][name] - theirs[step][name]) for step in theirs for name in LOGGED]
    return next((each for each in differences if each != each), max(differences))


def benchmark(script: str, *flags: str) -> Callable[[Setting], Found]:
    """A part that is a benchmark of its own."""

    def part(setting: Setting) -> Found:
        log = setting.folder / f"{script}.log"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *(["--quick"] if setting.quick else flags)]
        summary = json.loads(finish(start(command, log), log, setting.left).splitlines()[-1])
        goals = [Goal(f"{script}: {g['what']}", g["value"], g["goal"], g["op"]) for g in summary["goals"]]
        rows = [(goal.what, goal.value, f"{goal.op} {goal.goal}") for goal in goals]
        return Found(summary["results"], goals, [Table(script, ("figure", "measured", "wanted"), rows)])

    return part


train_step = benchmark("train_step.py", "--depths", "1", "2", "--repeats", "15")
mtp_memory = benchmark("mtp_memory.py", "--vocab-sizes", "131072", "--tokens", "1024", "8192", "--repeats", "3")
