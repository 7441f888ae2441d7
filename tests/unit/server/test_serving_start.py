"""What `serve` and `generate` print about drafting, and what a server does before its first request."""

import json
from pathlib import Path

import pytest
from drafting_single import runner_of

from megatron_mtp.cli.serve import API_KEY, drafting_line, length_line, parser, run
from megatron_mtp.cli.terminal import say_if_lossy
from megatron_mtp.decoding.batch import DecodeBatch
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.engine import Engine, warm_up
from megatron_mtp.decoding.method import parse_config
from megatron_mtp.decoding.requests import Update
from megatron_mtp.decoding.scheduler import EngineSettings

pytestmark = pytest.mark.usefixtures("megatron")

BOTH = "verified by greedy at temperature 0 and rejection above"
LINES = {
    '{"method": "plain"}': "drafts: none, plain decoding",
    '{"method": "mtp", "num_speculative_tokens": 2}': f"drafts: mtp, 2 tokens a step, {BOTH}",
    '{"method": "mtp", "num_speculative_tokens": "auto"}': f"drafts: mtp, 0 to 3 tokens a step, as pays, {BOTH}",
    '{"method": "mtp_eagle", "num_speculative_tokens": 3, "verifier": "block"}': (
        "drafts: mtp_eagle, 3 tokens a step, verified by block"
    ),
}


@pytest.mark.parametrize("config", LINES)
def test_a_server_says_how_it_drafts(config: str) -> None:
    assert drafting_line(Engine(runner_of(), speculative=parse_config(config))) == LINES[config]


def test_the_api_key_comes_from_a_flag_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(API_KEY, "of the variable")
    assert parser("serve").parse_args(["--load", "x"]).api_key == "of the variable"
    assert parser("serve").parse_args(["--load", "x", "--api-key", "of the flag"]).api_key == "of the flag"
    file = tmp_path / "key"
    file.write_text("of the file\n")
    given = ["--load", "x", "--api-key-file", str(file)]
    assert parser("serve").parse_args(given).api_key == "of the file"
    for wrong, said in ((["--api-key", "k"], "not allowed with argument"), ([f"--api-key-file={tmp_path}"], "a text")):
        with pytest.raises(SystemExit):
            parser("serve").parse_args([*given, *wrong])
        assert said in capsys.readouterr().err
    file.write_text("\n")
    monkeypatch.setenv(API_KEY, "")
    for empty in (given, given[:2]):
        with pytest.raises(ValueError, match=f"{API_KEY} is empty; give a key"):
            run(parser("serve").parse_args(empty))


def test_a_server_reports_the_length_limit_of_a_small_cache() -> None:
    engine = Engine(runner_of(), EngineSettings(blocks=2), parse_config('{"method": "mtp"}'))
    assert "has at most 60 tokens, not 160: the cache holds no more; --cache-gib" in length_line(engine)


@pytest.mark.parametrize(
    ("verifier", "more"), [("bild", {}), ("joint", {}), ("relaxed", {"think_start": 1, "think_end": 2}), ("block", {})]
)
def test_a_verifier_that_changes_the_distribution_is_named(
    verifier: str, more: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    say_if_lossy(parse_config(json.dumps({"method": "mtp", "verifier": verifier, **more})))
    said = "" if verifier == "block" else f"> the verifier '{verifier}' does not keep the model's distribution\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("verifier", [None, "greedy"])
def test_a_warm_up_takes_steps_of_every_size_and_leaves_no_trace(
    verifier: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, config = runner_of(), SpeculativeConfig("mtp", 2, verifier)
    engine = Engine(target, EngineSettings(running=3, waiting=1), config)
    sizes = set[tuple[int, bool]]()
    own = DecodeBatch.step

    def step(batch: DecodeBatch) -> list[Update]:
        sizes.add((len([*batch.seqs]), batch.method.sampling.greedy))
        return own(batch)

    monkeypatch.setattr(DecodeBatch, "step", step)
    alarm = target.alarm
    warm_up(engine)
    assert sizes == {(size, greedy) for size in (1, 2, 3) for greedy in ({True} if verifier else {True, False})}
    assert target.alarm is alarm
    assert not engine.busy
    assert engine.load == Engine(target, EngineSettings(running=3, waiting=1), config).load
