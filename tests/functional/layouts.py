"""The parallel layouts that must all compute what one process computes: every row here is a test in test_layouts.py.

Plain data, since both the tests and the jobs that they start (layout_jobs.py) read it. A new layout is a row of
`LAYOUTS`; a new kind of model is a row of `MODELS`.
"""

from dataclasses import dataclass

_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.1"
)
MODELS: dict[str, str] = {
    "tied-d1": "--mtp-num-layers 1",
    "untied-d1": "--mtp-num-layers 1 --untie-embeddings-and-output-weights",
    "tied-d3": "--mtp-num-layers 3",
    "untied-d3": "--mtp-num-layers 3 --untie-embeddings-and-output-weights",
    "repeated-d3": "--mtp-num-layers 3 --mtp-use-repeated-layer",
    "moe-d2": f"--mtp-num-layers 2 {_EXPERTS} --moe-token-dispatcher-type allgather",
    "moe-alltoall-d2": f"--mtp-num-layers 2 {_EXPERTS} --moe-token-dispatcher-type alltoall",
}
"""Megatron's flags of a model, beside `layout_jobs.COMMON`."""

MOE = ("moe-d2", "moe-alltoall-d2")
ALL = tuple(MODELS)
DENSE = tuple(name for name in MODELS if name not in MOE)
DEEP = ("tied-d3", "untied-d3")


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes, and the models that are tried in it."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    flags: str = ""
    models: tuple[str, ...] = ALL

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"

SINGLE = "single"
LAYOUTS: dict[str, Layout] = {
    SINGLE: Layout(),
    "tp2": Layout(tp=2, models=DENSE),  # Megatron wants sequence parallelism with experts and tensor parallelism
    "tp2-sp": Layout(tp=2, flags="--sequence-parallel"),
    "pp2": Layout(pp=2),
    "pp2-vpp2": Layout(pp=2, flags="--num-virtual-stages-per-pipeline-rank 2", models=DEEP),
    "dp2": Layout(dp=2, flags=DISTRIBUTED_OPTIMIZER),
    "ep2": Layout(dp=2, flags="--expert-model-parallel-size 2", models=MOE),
    "tp2-pp2": Layout(tp=2, pp=2, models=DEEP),
    "pp2-dp2": Layout(pp=2, dp=2, flags=DISTRIBUTED_OPTIMIZER, models=DEEP),
    "pp4-mtp-stage": Layout(pp=4, flags="--pipeline-model-parallel-layout Ett|tt|mmm|L", models=DEEP),
    "pp2-ep2": Layout(pp=2, dp=2, flags="--expert-model-parallel-size 2", models=("moe-d2",)),
}

CASES = [(model, name) for name, layout in LAYOUTS.items() if name != SINGLE for model in layout.models]
"""Model and layout of every comparison with a single process."""

MOVES = [
    (model, source, target)
    for model in DEEP
    for source, target in (
        (SINGLE, "pp2"),
        ("pp2", "tp2"),
        ("tp2", "pp2"),
        ("tp2", "dp2"),
        ("dp2", "pp2"),
        ("dp2", "dp2"),
        ("dp2", "pp2-dp2"),
        ("pp2", SINGLE),
        ("tp2", SINGLE),
        ("dp2", SINGLE),
    )
]
"""Model, the layout that saved a checkpoint, and the one that loads it."""


def _jobs(world_size: int) -> list[str]:
    """Every training step, and every load of what this world size or a smaller one has saved."""
    steps = [f"train/{model}/{name}" for model, name in CASES if LAYOUTS[name].world_size == world_size]
    moves = [f"move/{'/'.join(move)}" for move in MOVES if LAYOUTS[move[2]].world_size == world_size]
    return steps + moves


@dataclass(frozen=True)
class Launch:
    """Jobs that share one process set, after those of the launches that it needs."""

    world_size: int
    jobs: list[str]
    needs: tuple[str, ...] = ()


LAUNCHES: dict[str, Launch] = {
    SINGLE: Launch(
        1,
        [
            f"{job}/{model}/{rest}"
            for model in MODELS
            for job, rest in (
                ("init", "ours"),
                ("train", SINGLE),
                ("move", f"{SINGLE}/{SINGLE}"),
                ("init", "megatron"),
                ("forward", "ours/ours"),
                ("forward", "megatron/ours"),
                ("forward", "megatron/megatron"),
                ("forward", "ours/megatron"),
            )
        ],
    ),
    "two processes": Launch(
        2,
        [
            *_jobs(2),
            "train/tied-d3/pp2/no-embedding-group",
            "save_entries/tied-d3/pp2/megatron",
            "save_entries/tied-d3/pp2/ours",
        ],
        needs=(SINGLE,),
    ),
    "four processes": Launch(4, _jobs(4), needs=(SINGLE, "two processes")),
    "back to one": Launch(1, _jobs(1), needs=(SINGLE, "two processes")),
}
