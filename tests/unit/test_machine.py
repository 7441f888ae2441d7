"""A rank without a GPU in a job with GPUs is refused, and CUDA gets one connection where Megatron insists."""

import os
import platform

import pytest
import torch

from megatron_mtp.training import machine, run
from megatron_mtp.training.machine import GIVEN_GPUS, check_device, set_connections

SHARED = ["pretrain_gpt.py", "--tensor-model-parallel-size", "2"]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*GIVEN_GPUS, machine.CONNECTIONS, machine.ALLOW_CPU):
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8f7d"),
        ("SLURM_JOB_GPUS", "0,1"),
        ("SLURM_GPUS_ON_NODE", "8"),
        ("SLURM_GPUS_PER_NODE", "h100:4"),
    ],
)
def test_a_rank_on_the_cpu_in_a_job_with_gpus_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run.fit_to_machine(["pretrain_gpt.py"], on_cpu=True)
    assert ended.value.code == 2
    said = f"error: rank 0 on {platform.node()} finds no CUDA device, but {name} is {value}; "
    assert said in capsys.readouterr().err
    check_device(on_cpu=False)
    monkeypatch.setenv("MEGATRON_MTP_ALLOW_CPU", "1")
    check_device(on_cpu=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles"),
        ("SLURM_GPUS_ON_NODE", "0"),
        ("SLURM_CPUS_ON_NODE", "8"),
    ],
)
def test_a_job_without_gpus_runs_on_the_cpu(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    check_device(on_cpu=True)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--tensor-model-parallel-size 2", "1"),
        ("--context-parallel-size=4", "1"),
        ("--tensor-model-parallel-size 1 --context-parallel-size 2", "1"),
        ("--tensor-model-parallel-size 1", None),
        ("--pipeline-model-parallel-size 2", None),
        ("--tensor-model-parallel-size 2 --use-megatron-fsdp", None),
    ],
)
def test_one_connection_where_megatron_insists(words: str, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "set_machine_flags", lambda argv, on_cpu: None)
    run.fit_to_machine(["pretrain_gpt.py", *words.split()], on_cpu=False)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == value


@pytest.mark.parametrize(("capability", "is_refused"), [((9, 0), True), ((10, 0), False)])
def test_another_number_is_refused_where_megatron_refuses_it(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if is_refused:
        with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS is 8, but tensor and context"):
            set_connections(SHARED, on_cpu=False)
    else:
        set_connections(SHARED, on_cpu=False)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "a user's value stays"
