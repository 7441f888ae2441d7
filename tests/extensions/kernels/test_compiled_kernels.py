"""Compiled loss kernels compared with the record; occupancy; predicted times."""

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from documents import DOCUMENTS, ROOT
from tiers import tiered

from megatron_mtp.cli import main as cli
from megatron_mtp.losses import triton_chunk

pytest.importorskip("triton")
from megatron_mtp.extensions.kernels import command, tables
from megatron_mtp.extensions.kernels.cards import CARDS
from megatron_mtp.extensions.kernels.compiled import Kernel, kernels, launches, names
from megatron_mtp.extensions.kernels.roofline import CALIBRATING, SEEN, SEEN_POSITIONS

RECORD = ROOT / "benchmarks/results/kernels.json"
AS_MEANT = f"if it is meant, run `megatron-mtp doctor --kernels --json > {RECORD.relative_to(ROOT)}`"


def worse(made: Iterable[Kernel]) -> list[str]:
    """Return kernels that spill more than those of the record, or have lower occupancy."""
    recorded = {(one["name"], one["target"]): one for one in json.loads(RECORD.read_text(encoding="utf-8"))["kernels"]}
    found = []
    for kernel in made:
        before = recorded[kernel.name, kernel.target]
        if kernel.spilled > before["spilled"] or kernel.occupancy < before["occupancy"]:
            found.append(f"{tables.figures(kernel)}, before {before}")
    return found


@pytest.mark.parametrize("target", tiered(CARDS, (90,)))
def test_no_kernel_spills_or_has_lower_occupancy_than_recorded(target: int, pytestconfig: pytest.Config) -> None:
    made = kernels(target, names(), drafted=pytestconfig.getoption("--all"))
    assert {"trial", "cross_entropy", "overlap_gradient, with kd"} <= {kernel.name for kernel in made}
    assert worse(made) == [], AS_MEANT


def test_a_kernel_with_lower_occupancy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_chunk, "BLOCK", 16_384)
    spread = launches(90, "ce")
    assert [said.split("'")[3] for said in worse(spread)] == ["statistics", "cross_entropy"]


@pytest.mark.matrix
def test_a_kernel_that_spills_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_chunk, "BLOCK", 65_536)
    spread = launches(90, "kd")
    assert max(kernel.spilled for kernel in spread) > 0
    assert worse(spread)


@pytest.mark.matrix
def test_the_record_has_every_kernel_and_card() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    found = {(one["name"], one["target"]) for one in recorded["kernels"]}
    assert found == {(kernel.name, target) for kernel in kernels(90, names()) for target in CARDS}, AS_MEANT
    assert recorded["products reach"] == tables.rate_seen(), AS_MEANT


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "expected"),
    [
        (90, 32, 0, 8, (1.0, "warps")),
        (90, 33, 0, 8, (0.75, "registers")),
        (90, 64, 0, 8, (0.5, "registers")),
        (90, 65, 0, 8, (0.375, "registers")),
        (89, 40, 0, 8, (1.0, "warps")),
        (89, 64, 0, 8, (32 / 48, "registers")),
        (80, 32, 40 * 1024, 8, (0.5, "shared memory")),
        (90, 255, 0, 16, (0.0, "registers")),
    ],
)
def test_occupancy(target: int, registers: int, shared: int, warps: int, expected: tuple[float, str]) -> None:
    """Computed by hand; 16 warps of 255 registers do not start at all."""
    assert CARDS[target].occupancy(registers, shared, warps) == expected


def test_kernels_move_the_designed_bytes_per_logit() -> None:
    moved = {name: sum(kernel.moved for kernel in launches(90, name)) for name in names()}
    assert moved == {"ce": 6, "kd": 10} | dict.fromkeys(("tv", "nla", "lk", "e2e_tv"), 14)


def test_the_record_of_ce_predicts_the_other_losses() -> None:
    """docs/explanation/evidence_gpu.md: milliseconds on an H200; only `ce` calibrates."""
    page = DOCUMENTS["docs/explanation/evidence_gpu.md"].read_text(encoding="utf-8")
    rate = tables.rate_seen()
    for name, seconds in SEEN.items():
        found = re.search(rf"^\| {name} \| 1,664 \| ([\d.]+) \|$", page, re.MULTILINE)
        assert found is not None
        assert float(found[1]) == pytest.approx(1000 * seconds)
        within = 1e-12 if name == CALIBRATING else 0.1
        assert tables.work_of(name, SEEN_POSITIONS).seconds(CARDS[90], rate) == pytest.approx(seconds, rel=within)


def test_the_doctor_prints_the_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels_of_ce(target: int, _: Any) -> list[Kernel]:
        return launches(90, "ce")

    monkeypatch.setattr(tables, "kernels", kernels_of_ce)
    assert cli.main(["doctor", "--kernels", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {kernel["name"] for kernel in found["kernels"]} == {"statistics", "cross_entropy"}
    assert cli.main(["doctor", "--kernels"]) == 0
    said = capsys.readouterr().out
    for table in found["tables"]:
        assert f"{table['title']}:\n{table['header'][0]}" in said


def test_the_interpreter_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "--kernels"])
    assert end.value.code == 2
    assert "error: TRITON_INTERPRET is 1, so Triton interprets kernels" in capsys.readouterr().err


def test_missing_triton_is_reported_with_a_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "why_not", lambda _: "it is not installed")
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "--kernels"])
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("megatron-mtp doctor: error: Triton ")
    assert said.endswith("; run: pip install triton.")
