"""A run that switches between GPT and hybrid model halfway has the same losses as one that does not.

The first tier tests the same conversions bit by bit: tests/unit/checkpoint/convert/test_migration.py.
"""

from dataclasses import dataclass
from pathlib import Path

import launch
import pytest

pytestmark = pytest.mark.matrix

RUN = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 2 --train-iters 8 --lr 1e-3 --log-interval 1 "
    "--eval-interval 100 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 "
    "--moe-token-dispatcher-type allgather"
)
MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --max-position-embeddings 32 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.01"
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --qk-layernorm"
)
GPT, PATTERN, DISTRIBUTED = "--num-layers 2 --mtp-num-layers", "--hybrid-layer-pattern", "--use-distributed-optimizer"
HALF, STEPS = 4, 8

CASES = {
    "a GPT with experts, distributed optimizer": (f"{GPT} 2 {EXPERTS} --moe-layer-freq [0,1]", DISTRIBUTED),
}
MORE = {
    "a hybrid of latent attention": (f"{PATTERN} +-+-/+- {LATENT} --untie-embeddings-and-output-weights", ""),
    "a GPT": (f"{GPT} 1", ""),
    "a GPT in bfloat16": (f"{GPT} 2", "--bf16"),
    "a GPT in bfloat16, distributed optimizer": (f"{GPT} 2", f"--bf16 {DISTRIBUTED}"),
    "state by parameter": (f"{GPT} 1", f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"),
    "a repeated layer": (f"{GPT} 2 --mtp-use-repeated-layer {LATENT} {EXPERTS}", DISTRIBUTED),
    "parallel heads, a draft vocabulary": (
        f"{GPT} 2 --mtp-architecture parallel",
        f"--mtp-draft-vocab-file IDS {DISTRIBUTED}",
    ),
    "a hybrid with experts, distributed optimizer": (f"{PATTERN} *-*E/*E/*E {EXPERTS}", DISTRIBUTED),
}


def losses(folder: Path, name: str, flags: str, processes: int = 1) -> dict[int, dict[str, float]]:
    """Return losses and gradient norms of a run's steps."""
    words = f"{RUN} {flags} --mtp-metrics-dir {folder / f'{name}-metrics'}".split()
    launch.run(launch.Command("pretrain_gpt.py", tuple(words), processes), folder / f"{name}.log")
    return launch.learned(folder / f"{name}-metrics")


@dataclass(frozen=True)
class Layout:
    """Number of processes, and their flags."""

    flags: str = ""
    processes: int = 1


def both(folder: Path, model: str, run: str, before: Layout = Layout(), after: Layout = Layout()) -> None:
    """Run all steps; and from halfway on in the other form, possibly in another layout."""
    (folder / "ids.txt").write_text("\n".join(map(str, range(10, 60))))
    run = run.replace("IDS", str(folder / "ids.txt"))
    saves = f"--save {folder / 'run'} --save-interval {HALF}"
    straight = losses(folder, "straight", f"{MODEL} {model} {run} {before.flags} {saves}", before.processes)
    verb = "hybrid-to-gpt" if PATTERN in model else "gpt-to-hybrid"
    words = (verb, str(folder / "run" / f"iter_{HALF:07d}"), str(folder / "other"))
    launch.run(launch.python("tools/checkpoint/convert.py", *words), folder / "convert.log")
    goes_on = f"{run} {after.flags} --load {folder / 'other'} --use-checkpoint-args"
    changed = losses(folder, "changed", goes_on, after.processes)
    assert sorted(changed) == list(range(HALF + 1, STEPS + 1))
    for step, found in changed.items():
        assert found == pytest.approx(straight[step], rel=1e-6 if before == after else 1e-5), step


@pytest.mark.parametrize("case", CASES)
def test_a_converted_checkpoint_resumes_with_the_same_losses(case: str, tmp_path: Path) -> None:
    both(tmp_path, *CASES[case])


@pytest.mark.parametrize("case", MORE)
def test_other_models_and_optimizers_resume_after_conversion(case: str, tmp_path: Path) -> None:
    both(tmp_path, *MORE[case])


NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
BY_PARAMETER = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
TP2 = Layout("--tensor-model-parallel-size 2 --sequence-parallel", 2)
PP2 = Layout("--pipeline-model-parallel-size 2", 2)
EP2 = Layout("--micro-batch-size 1 --expert-model-parallel-size 2", 2)
LAYOUTS = {
    "one rank, then TP2": (f"{GPT} 2", "", Layout(), TP2),
    "a hybrid, one rank, then TP2": (f"{PATTERN} *-*-/*-", BY_PARAMETER, Layout(), TP2),
    "PP2, in buffers": (f"{GPT} 1", DISTRIBUTED, PP2, PP2),
    "a hybrid, PP2, in buffers": (f"{PATTERN} *-|*-/*-", DISTRIBUTED, PP2, PP2),
    "a hybrid, EP2": (f"{PATTERN} *-*E/*E {EXPERTS}", DISTRIBUTED, EP2, EP2),
    "TP2, then PP2": (f"{GPT} 2", BY_PARAMETER, TP2, PP2),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_converted_checkpoint_resumes_in_any_layout(case: str, tmp_path: Path) -> None:
    model, run, before, after = LAYOUTS[case]
    both(tmp_path, f"{model} {NO_DROPOUT}", run, before, after)
