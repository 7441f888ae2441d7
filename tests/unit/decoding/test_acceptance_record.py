"""acceptance.py: the record next to a model, and the engine's alarm if acceptance deviates from it."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from drafting_single import prompts_of, runner_of
from tiers import tiered

from megatron_mtp.common.acceptance import RECORD, AcceptanceStats, record_of
from megatron_mtp.common.record import carry_record, read_record
from megatron_mtp.decoding.alarm import Alarm
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import Request
from megatron_mtp.server.metrics import EngineMetrics

MTP = {"method": "mtp", "num_speculative_tokens": 2}
EVALUATED = AcceptanceStats(
    offered_at=[100, 100], reached_at=[100, 80], accepted_at=[80, 40], overlap_at=[70.0, 50.0], emitted=1
)


def write(folder: Path, stats: AcceptanceStats = EVALUATED) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / RECORD).write_text(json.dumps(record_of(stats, 7, "validation")))
    return folder


def test_a_position_is_reached_where_those_before_it_were_accepted() -> None:
    stats = AcceptanceStats()
    for accepted in (1, 3, 0):
        stats.count(offered=3, accepted=accepted, emitted=accepted + 1)
    assert (stats.offered_at, stats.reached_at, stats.accepted_at) == ([3, 3, 3], [3, 2, 1], [2, 1, 1])


def test_a_record_gives_the_expected_acceptance(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    assert json.loads((folder / RECORD).read_text())["acceptance"] == [0.8, 0.4]
    assert read_record(folder) == pytest.approx([0.7, 0.35])
    (tmp_path / "copy").mkdir()
    carry_record(folder, tmp_path / "copy")
    assert read_record(tmp_path / "copy") == read_record(folder)
    assert read_record(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"acceptance": [1]}', '{"acceptance": [1], "overlap": [1, 1]}'])
def test_a_damaged_record_is_rejected_with_a_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ValueError, match="not a record of acceptance; remove it, or evaluate"):
        read_record(tmp_path)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("expected", [[0.7, 0.35], None])
def test_a_random_head_raises_one_alarm_within_a_hundred_rounds(
    expected: list[float] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Random MTP layers guess one token in 96; without a record, an alarm needs drafts that are never accepted."""
    runner = runner_of(depths=2)
    runner.alarm.expected = expected
    if expected is None:
        runner.depth = lambda depth, hidden_SBH, *_: -3 * hidden_SBH  # type: ignore[method-assign]
    engine = Engine(runner, speculative=config_from(MTP))
    for seed, prompt in enumerate(prompts_of(8)):
        engine.add(Request(prompt, 60, seed=seed))
    for _ in range(100):
        engine.step()
    messages = [record.getMessage() for record in caplog.records]
    said = [message for message in messages if "drafting costs time and saves little" in message]
    assert len(said) == 1
    assert ("70.0% were recorded" in said[0]) == (expected is not None)


@pytest.mark.parametrize("recorded", [0.02, 0.1, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("share", tiered([0.75, 1.0], (0.75,)))
def test_a_healthy_head_raises_no_alarm_in_five_thousand_requests(recorded: float, share: float) -> None:
    """Twenty drafts per request; on text that differs from the evaluation's, three quarters as many are accepted."""
    generator = random.Random(0)
    alarm = Alarm([recorded])
    for _ in range(5000):
        stats = AcceptanceStats()
        for _ in range(20):
            stats.count(1, int(generator.random() < share * recorded), 1)
        assert alarm.learn(stats) is None


@pytest.mark.parametrize("recorded", [0.1, 0.4, 0.95])
def test_a_stale_head_raises_an_alarm_and_new_weights_reset_it(recorded: float) -> None:
    generator = random.Random(0)
    alarm, said = Alarm([recorded]), []
    for _ in range(4000):
        stats = AcceptanceStats()
        stats.count(1, int(generator.random() < 0.25 * recorded), 1)
        said += [sentence for sentence in [alarm.learn(stats)] if sentence]
    assert len(said) == 1
    fresh = Alarm([recorded])
    for _ in range(63):
        assert fresh.learn(replace(AcceptanceStats(), offered_at=[1], accepted_at=[0])) is None
        fresh.reset()


@pytest.mark.usefixtures("megatron")
def test_the_metrics_have_the_expected_acceptance_beside_the_measured_one() -> None:
    runner = runner_of(depths=2)
    runner.alarm.expected = [0.7, 0.35]
    engine = Engine(runner, speculative=config_from(MTP))
    families = {family.name: family for family in EngineMetrics(lambda: engine.load).collect()}
    samples = families["megatron_mtp_spec_decode_expected_acceptance_per_pos"].samples
    assert {sample.labels["position"]: sample.value for sample in samples} == {"0": 0.7, "1": 0.35}
