"""`megatron-mtp doctor --distributed` in two processes: they agree, a rank that does not is named, nothing hangs."""

import json
import os
import sys
from pathlib import Path

import fork_server
import pytest
import torch
from torch.distributed import TCPStore

from megatron_mtp.command import doctor_distributed
from megatron_mtp.command.doctor_distributed import compared, distance, of_clocks, text_of
from megatron_mtp.command.ranks import place_of
from megatron_mtp.training.trial_step import Step, layouts_of

RUN = "import sys; from megatron_mtp.command import doctor_distributed as doctor, links, ranks; {fault}; "
RUN += "sys.exit(doctor.main('doctor', {json}, {seconds}))"
OF_RANK_1 = "import os; of_1 = os.environ['RANK'] == '1'; "
FACTS = f"{OF_RANK_1} own = doctor.facts_of; "
FACTS += "doctor.facts_of = lambda *given: own(*given) | ({'torch': '9.9'} if of_1 else {})"
HANGS = f"{OF_RANK_1} import time; own = doctor.clock_offset; "
HANGS += "doctor.clock_offset = lambda group: time.sleep(90) if of_1 else own(group)"
FAILS = f"{OF_RANK_1} own = doctor.bandwidths; doctor.bandwidths = lambda on_cpu: 1 / 0 if of_1 else own(on_cpu)"
WRONG = f"{OF_RANK_1} from megatron_mtp.training import trial_step; from dataclasses import replace; "
WRONG += "own = trial_step.distributed; trial_step.distributed = lambda layout, number: replace(own(layout, number), "
WRONG += "loss=own(layout, number).loss * (1 + 1e-4 * of_1))"


def examined(
    folder: Path, fault: str = "pass", as_json: bool = False, seconds: float = 60.0, ranks: int = 2
) -> list[tuple[int, str, str]]:
    """Status, output and errors of a job of two, of which the last may not come; its ranks are forks."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one
    code = RUN.format(fault=fault, json=as_json, seconds=seconds)
    common = {**fork_server.without_ranks(), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    common |= {"MASTER_PORT": str(store.port), "CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = []
    for rank in range(ranks):
        with open(folder / f"out-{rank}", "wb") as out, open(folder / f"error-{rank}", "wb") as error:
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(fork_server.start([sys.executable, "-c", code], stdout=out, stderr=error, env=own))
    statuses = [process.wait(280) for process in started]
    texts = [[(folder / f"{kind}-{rank}").read_text() for kind in ("out", "error")] for rank in range(ranks)]
    return [(status, out, error) for status, (out, error) in zip(statuses, texts, strict=True)]


def test_two_ranks_compute_as_one(tmp_path: Path) -> None:
    """The row of every layout, whose numbers are those of plain autograd in one process."""
    (status, out, _), (other, nothing, _) = examined(tmp_path, as_json=True)
    assert (status, other, nothing) == (0, 0, "")
    found = json.loads(out)
    assert found["can_train"]
    assert [fact["rank"] for fact in found["ranks"]] == [0, 1]
    checks = {each["name"]: each for each in found["checks"]}
    trained = [name for name in checks if name.startswith("training, ")]
    assert trained == [f"training, {name}" for name in ("DP 2", "TP 2", "PP 2", "CP 2", "EP 2")]
    assert all(each["ok"] for each in checks.values())
    assert {"clocks", "all-reduce", "all-gather", "torch", "megatron-core", "CUDA_DEVICE_MAX_CONNECTIONS"} <= {*checks}


def test_a_rank_with_other_versions_is_named(tmp_path: Path) -> None:
    (status, out, _), (other, *_) = examined(tmp_path, FACTS)
    assert (status, other) == (1, 1)
    assert f"FAIL torch                        {torch.__version__}; rank 1 on " in out
    assert "has 9.9" in out
    assert "not tried, since the ranks are not alike" in out
    assert out.splitlines()[-1].startswith("these ranks cannot train together: torch")


def test_a_rank_that_computes_otherwise_is_named(tmp_path: Path) -> None:
    (status, out, _), (other, *_) = examined(tmp_path, WRONG)
    assert (status, other) == (1, 1)
    failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 5
    assert all(line.endswith("apart from one process 1.0e-04, on rank 1") for line in failed)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        pytest.param(HANGS, "rank 0 on {node} waited 5 s in ", marks=pytest.mark.matrix),
        (FAILS, "rank 1 on {node}, in bandwidth: ZeroDivisionError: division by zero"),
    ],
    ids=["hangs", "fails"],
)
def test_a_rank_that_hangs_or_fails_ends_all_of_them(fault: str, says: str, tmp_path: Path) -> None:
    (status, _, error), (other, *_) = examined(tmp_path, fault, seconds=5.0 if fault == HANGS else 60.0)
    assert (status, other) == (1, 1)
    (sentence,) = [line for line in error.splitlines() if "error: " in line]
    assert sentence.startswith("doctor: error: " + says.format(node=os.uname().nodename))


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    ((status, _, error),) = examined(tmp_path, seconds=1.0, ranks=1)
    assert status == 1
    assert "of 2 ranks, these did not come within 1 s: 1; look at their logs" in error


def test_it_is_for_the_ranks_of_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        doctor_distributed.main("doctor", False, 1.0)
    assert ended.value.code == 2
    assert "neither torchrun nor srun has started this process; give torchrun" in capsys.readouterr().err


def test_places_by_torchrun_and_by_srun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    place = place_of(given | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (place.rank, place.ranks, place.local_rank, place.address, place.port) == (3, 8, 1, "a", 5)
    assert place.hosted
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node7\necho node8\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    given = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node[7-8]"}
    place = place_of(given | {"SLURM_JOB_ID": "1234567"})
    assert (place.rank, place.ranks, place.local_rank, place.address, place.port) == (2, 4, 0, "node7", 24567)
    assert not place.hosted
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"scontrol does not name the hosts of node\[7-8\] .*; give MASTER_ADDR"):
        place_of(given)


def test_rows_that_differ() -> None:
    facts = [{"rank": rank, "node": f"n{rank}", **dict.fromkeys(doctor_distributed.ALIKE, "1")} for rank in range(3)]
    facts[2]["torch"] = None
    torch_row = next(row for row in compared(facts) if row.name == "torch")
    assert (torch_row.ok, torch_row.found) == (False, "1; rank 2 on n2 has None")
    assert not of_clocks([0.0, 2.5, -0.5]).ok
    assert of_clocks([0.0, 0.25]).found == "apart at most 250.000 ms; rank 1 is +250.000 ms from rank 0"
    assert text_of([of_clocks([0.0, 9.0])], True).startswith("-    clocks")


def test_distances() -> None:
    assert distance(Step(2.0, 4.0), Step(2.0, 5.0)) == 0.25
    assert distance(Step(2.0, 4.0), Step(float("nan"), 4.0)) == float("inf")
    assert [layout.name for layout in layouts_of(4)] == ["DP 4", "TP 2", "PP 2", "CP 2", "EP 2"]
    assert [layout.name for layout in layouts_of(3)] == ["DP 3"]
    assert layouts_of(1) == ()
