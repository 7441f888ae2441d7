"""Resume a run with more or fewer MTP layers: everything else keeps its weights and moments, bit by bit."""

from dataclasses import dataclass
from pathlib import Path

import launch
import pytest
import torch
from tiers import tiered

from megatron_mtp.megatron.checkpoint.reader import DistReader

HALF, STEPS = 3, 6
RUN = (
    f"--train-iters {STEPS} --lr-decay-iters 100 --save-interval 100 --log-interval 1 --eval-interval 100 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
)
BY_PARAMETER = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@dataclass(frozen=True)
class Case:
    """MTP layers before and after, initialization of new ones, flags of all runs, and number of processes."""

    before: int
    after: int
    flags: str = ""
    init: str = "last-layer"
    processes: int = 1


CASES = {
    "one more, TP2, distributed": Case(1, 2, f"--bf16 {BY_PARAMETER} {TP2}", processes=2),
    "one less": Case(2, 1),
    "two more": Case(1, 3, init="random"),
}
MORE = {
    "one more, bfloat16": Case(1, 2, "--bf16"),
    "one less, TP2, distributed": Case(2, 1, f"--bf16 {BY_PARAMETER} {TP2}", processes=2),
    "one less, bfloat16": Case(3, 1, "--bf16"),
    "one more, distributed, float32": Case(1, 2, BY_PARAMETER, init="random"),
    "one more, DP2": Case(1, 2, f"--bf16 {BY_PARAMETER}", processes=2),
    "one more, PP2": Case(1, 2, f"--bf16 {BY_PARAMETER} --pipeline-model-parallel-size 2", processes=2),
    "one more, a group of their own": Case(1, 2, "--bf16 --mtp-lr 1e-2"),
    "one more, experts": Case(
        1, 2, f"{BY_PARAMETER} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather"
    ),
}


def run(folder: Path, name: str, case: Case, layers: int, *flags: str) -> str:
    """Run with so many MTP layers and save the last step; return the output."""
    words = f"{RUN} {case.flags} --mtp-num-layers {layers} --save {folder / name} {' '.join(flags)}"
    command = launch.pretrain(*words.split(), "--mtp-metrics-dir", f"{folder / name}-metrics", processes=case.processes)
    return launch.run(command, folder / f"{name}.log")


def check(folder: Path, case: Case) -> None:
    """Run halfway; load the checkpoint with the other number of layers and save before the first step; run both to the
    end.
    """
    half, goes_on = f"--exit-interval {HALF}", f"--load {folder / 'first'}"
    init = f"--mtp-init {case.init}" if case.after > case.before else ""
    run(folder, "first", case, case.before, half)
    no_step = f"--train-iters {HALF} --override-opt-param-scheduler"
    said = run(folder, "second", case, case.after, goes_on, init, no_step)
    run(folder, "third", case, case.after, goes_on, init)
    run(folder, "straight", case, case.before, goes_on)
    first, second, third = (DistReader(folder / name) for name in ("first", "second", "third"))
    new = [f".{layer}." for layer in range(case.before, case.after)]
    gone = [f".{layer}." for layer in range(case.after, case.before)]
    stored, kept = ({*reader.keys, *reader.state_keys} for reader in (first, second))
    of_new = {key for key in kept if any(f"mtp.layers{layer}" in key for layer in new)}
    of_gone = {key for key in stored if any(f"mtp.layers{layer}" in key for layer in gone)}
    assert bool(of_new) == bool(new)
    assert bool(of_gone) == bool(gone)
    assert kept == (stored - of_gone) | of_new
    assert any("exp_avg_sq" in key for key in kept - of_new)
    assert [key for key in kept - of_new if not torch.equal(first.read(key), second.read(key))] == []
    assert not any(second.read(key).any() for key in of_new if "exp_avg" in key)
    for key in of_new:
        if ".fp32_param." in key or ".param." in key:
            weight = second.read("mtp." + key.partition(".mtp.")[2])
            assert torch.equal(second.read(key).to(weight.dtype), weight)
        if key.endswith("eh_proj.weight"):
            assert not torch.equal(second.read(key), third.read(key))
    assert f"has {case.before} MTP layers, this run {case.after}: layer" in said
    assert third.common()["iteration"] == STEPS
    changed, straight = (launch.learned(folder / f"{name}-metrics") for name in ("third", "straight"))
    assert sorted(changed) == list(range(HALF + 1, STEPS + 1))
    for name in ("lm loss", "mtp_1 loss", "learning rate"):
        assert changed[HALF + 1][name] == pytest.approx(straight[HALF + 1][name], rel=1e-6), name


@pytest.mark.parametrize("case", tiered(CASES, ("one less",)))
def test_a_run_resumes_with_other_mtp_layers(case: str, tmp_path: Path) -> None:
    check(tmp_path, CASES[case])


@pytest.mark.matrix
@pytest.mark.parametrize("case", MORE)
def test_a_run_of_any_kind_resumes_with_other_mtp_layers(case: str, tmp_path: Path) -> None:
    check(tmp_path, MORE[case])


@pytest.mark.matrix
def test_optimizer_state_in_buffers_must_be_saved_again_first(tmp_path: Path) -> None:
    case, again = Case(1, 2, "--use-distributed-optimizer"), Case(1, 2, BY_PARAMETER)
    run(tmp_path, "first", case, 1, f"--exit-interval {HALF}")
    init = f"--mtp-init last-layer --load {tmp_path}"
    with pytest.raises(AssertionError, match=r"buffers of all parameters.* 2; save it again"):
        run(tmp_path, "second", case, 2, f"{init}/first")
    run(tmp_path, "again", again, 1, f"--load {tmp_path / 'first'} --exit-interval {HALF + 1}")
    assert "layer 2 begins" in run(tmp_path, "second", again, 2, f"{init}/again")
