"""Schedule order against Megatron's own functions and runs, and schedule time against closed forms."""

import json
from pathlib import Path
from types import SimpleNamespace

import launch
import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_mtp.extensions.plan.schedule import BACKWARD, FORWARD, Pipeline, in_flight, order, simulate, table

SHAPES = [
    Pipeline(4, 1, 8, 4),
    Pipeline(4, 1, 2, 4),
    Pipeline(2, 3, 6, 2),
    Pipeline(4, 2, 8, 4, ahead=1),
    Pipeline(8, 4, 128, 8),
    Pipeline(16, 2, 40, 20),
    Pipeline(1024, 1, 64, 1024),
]


@pytest.mark.parametrize("pipeline", SHAPES, ids=str)
def test_the_schedule_order_matches_megatron(pipeline: Pipeline) -> None:
    rows = get_schedule_table(pipeline.microbatches, pipeline.virtual, pipeline.group)
    assert list(table(pipeline)) == rows
    for rank in {0, 1, pipeline.ranks // 2, pipeline.ranks - 1}:
        group = SimpleNamespace(size=lambda: pipeline.ranks, rank=lambda rank=rank: rank)
        virtual = pipeline.virtual if pipeline.virtual > 1 else None
        there = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
        total, _, ahead, _ = get_pp_rank_microbatches(
            pipeline.microbatches, pipeline.virtual, pipeline.group, False, bool(pipeline.ahead), there
        )
        steps = order(pipeline, rank)
        assert pipeline.warm_up(rank) == ahead
        assert sum(kind == FORWARD for kind, *_ in steps) == total == len(steps) / 2
        assert [(microbatch, chunk) for kind, chunk, microbatch in steps if kind == FORWARD] == rows
        backwards = [(microbatch, chunk) for kind, chunk, microbatch in steps if kind == BACKWARD]
        assert backwards == [(microbatch, pipeline.virtual - 1 - chunk) for microbatch, chunk in rows]


def test_the_order_of_two_ranks_matches_a_hand_written_one() -> None:
    assert order(Pipeline(2, 1, 3, 2), 0) == [
        *(("F", 0, 0), ("F", 0, 1), ("B", 0, 0)),
        *(("F", 0, 2), ("B", 0, 1), ("B", 0, 2)),
    ]
    assert order(Pipeline(2, 1, 3, 2), 1) == [
        *(("F", 0, 0), ("B", 0, 0), ("F", 0, 1)),
        *(("B", 0, 1), ("F", 0, 2), ("B", 0, 2)),
    ]


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), [(4, 1, 8), (8, 4, 32), (16, 2, 64), (1024, 1, 32)])
def test_bubbles_of_even_stages_match_the_closed_form(ranks: int, virtual: int, microbatches: int) -> None:
    """(p - 1) (f + b) / v in addition to m (f + b) (arXiv:2104.04473, section 2.2); for 1,024 ranks too."""
    pipeline, chunks = Pipeline(ranks, virtual, microbatches, ranks), ranks * virtual
    timeline = simulate(pipeline, [1.0] * chunks, [2.0] * chunks)
    assert timeline.seconds == pytest.approx(3.0 * (virtual * microbatches + ranks - 1))
    assert set(timeline.busy) == {3.0 * virtual * microbatches}


def test_the_slowest_stage_sets_the_pace() -> None:
    """Three ranks with 1 + 2, the last with 2 + 4: 6 per microbatch there, plus the way to it and back."""
    timeline = simulate(Pipeline(3, 1, 100, 3), [1.0, 1.0, 2.0], [2.0, 2.0, 4.0])
    assert timeline.seconds == pytest.approx(100 * 6 + 2 * 3)


def test_a_transfer_delays_the_first_and_the_last_microbatch() -> None:
    assert simulate(Pipeline(2, 1, 1, 2), [1.0, 1.0], [2.0, 2.0], 0.25).seconds == pytest.approx(6.5)


def test_forwards_in_flight() -> None:
    assert [in_flight(Pipeline(4, 1, 8, 4), rank, [1.0]) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(Pipeline(4, 1, 2, 4), 0, [1.0]) == 2
    assert in_flight(Pipeline(4, 2, 8, 4), 0, [1.0, 1.0]) == 3 * 2 + 4 + 1


STEPS = "--train-iters 1 --eval-iters 0 --eval-interval 10".split()
WORKER = Path(__file__).parent / "schedule_worker.py"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "pipeline"),
    [
        ("--num-layers 2 --pipeline-model-parallel-size 2 --global-batch-size 6", Pipeline(2, 1, 3, 2)),
        (
            "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
            "--global-batch-size 8",
            Pipeline(2, 2, 4, 2),
        ),
        ("--num-layers 4 --pipeline-model-parallel-size 4 --global-batch-size 12", Pipeline(4, 1, 6, 4)),
    ],
    ids=["1f1b", "interleaved", "four ranks"],
)
def test_a_gloo_run_follows_the_planned_order(flags: str, pipeline: Pipeline, tmp_path: Path) -> None:
    arguments = (*launch.PLAIN_RUN, *flags.split(), *STEPS, "--out", str(tmp_path))
    launch.run(launch.torchrun(pipeline.ranks, WORKER, *arguments), tmp_path / "log")
    for rank in range(pipeline.ranks):
        ran = json.loads((tmp_path / f"{rank}.json").read_text())
        steps = order(pipeline, rank)
        assert "".join(kind for kind, *_ in ran) == "".join(kind for kind, *_ in steps)
        forwards = [tuple(where) for kind, *where in ran if kind == FORWARD]
        assert forwards == [(chunk, microbatch) for kind, chunk, microbatch in steps if kind == FORWARD]
        held = most = 0
        for kind, *_ in ran:
            held += 1 if kind == FORWARD else -1
            most = max(most, held)
        assert most == in_flight(pipeline, rank, [1.0] * pipeline.virtual)
