"""`megatron-mtp attach`: its steps are valid commands in order, and a finished step is not repeated."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from attach_settings import command_of, settings
from documents import parse
from hf_models import make
from parrot import tokenizer_in
from written_datasets import write_dataset

from megatron_mtp.checkpoint.hf import hub
from megatron_mtp.cli import attach, attach_checks
from megatron_mtp.cli import main as cli
from megatron_mtp.cli.attach_guard import Gain, check_gain, gains
from megatron_mtp.cli.attach_probe import budget_of, keep_table
from megatron_mtp.cli.attach_record import RECORD
from megatron_mtp.cli.attach_settings import AttachSettings
from megatron_mtp.cli.attach_steps import STEPS, Step
from megatron_mtp.cli.attach_training import PASSES
from megatron_mtp.cli.convert import parser as of_convert
from megatron_mtp.cli.sample import parser as of_sample
from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.data.tokenizer import read_tokenizer
from megatron_mtp.megatron.checkpoint import TRACKER
from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.training.run_files import write_documents


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    return tmp_path / "hf"


ORDER = "preprocess convert convert train train convert convert generate".split()


def give_tokenizer(model: Path) -> None:
    """Write a byte-level tokenizer."""
    tokenizer_in(model.parent / "tokenizer").save_pretrained(model)


@pytest.mark.parametrize("layers", ["--mtp-layers", "--depths"])
def test_every_step_is_a_command_that_its_verb_takes(layers: str, model: Path, tmp_path: Path) -> None:
    args = settings(model, tmp_path / "run", layers, "3", "--float32", "--bf16", "--seed", "7")
    steps = [command_of(name, args) for name in STEPS if name not in ("sample", "probe")]
    for words in steps:
        assert words is not None
        parse("megatron-mtp", *words)
    assert [words[0] for words in steps if words] == ORDER
    assert command_of("sample", args) is None
    assert '{"method": "mtp"}' in (command_of("draft", args) or [])
    before, training = (words for words in steps if words and words[0] == "train")
    assert training[training.index("--load") + 1] == str(tmp_path / "run" / "start")
    for words in (before, training):
        assert words[words.index("--mtp-num-layers") + 1] == "3"
        assert words.count("--bf16") == 1  # the given one
        assert words[words.index("--bf16") :][:3] == ["--bf16", "--seed", "7"]


@pytest.mark.parametrize(("flags", "passes"), [([], PASSES), (["--unroll", "4"], 4)])
def test_a_single_depth_is_unrolled_as_it_drafts(flags: list[str], passes: int, model: Path, tmp_path: Path) -> None:
    args = settings(model, tmp_path / "run", *flags)
    commands = {name: command_of(name, args) or [] for name in ("start", "before", "train", "draft")}
    for words in commands.values():
        parse("megatron-mtp", *words)
    for name in ("start", "before", "train"):
        assert commands[name][commands[name].index("--mtp-num-layers") + 1] == "1"
    assert " ".join(commands["train"]).count(f"--mtp-use-repeated-layer --mtp-unroll {passes}") == 1
    assert f'{{"method": "mtp_eagle", "num_speculative_tokens": {passes}}}' in commands["draft"]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_is_trained_on_the_trunk_exported_and_drafts(kind: str, model: Path, tmp_path: Path) -> None:
    args = settings(model, tmp_path / "run", "--drafter", kind, "--drafter-steps", "4")
    commands = {name: command_of(name, args) for name in STEPS}
    left_out = [name for name, words in commands.items() if words is None]
    is_fitted = kind == "eagle3"
    assert left_out == ["start", "sample", "before", "probe", "verify"][is_fitted:]
    for words in filter(None, commands.values()):
        parse("megatron-mtp", *words)
    training = " ".join(commands["train"] or [])
    assert f"--drafter {kind} " in training
    assert f"--load {tmp_path}/run/{'start' if is_fitted else 'trunk'} --finetune" in training
    assert "--mtp-loss " not in training
    assert (commands["export"] or [])[1] == "drafter-to-hf"
    assert f'{{"method": "{kind}"}}' in (commands["draft"] or [])


def test_a_fitted_drafter_has_the_layers_and_tokens_of_its_training(model: Path, tmp_path: Path) -> None:
    flags = "--drafter eagle3 --drafter-layers 1 2 3 --lr 1e-3 --mtp-draft-vocab-size 64".split()
    fit = command_of("start", settings(model, tmp_path / "run", *flags)) or []
    assert " ".join(fit).endswith("data/corpus --drafter-layers 1 2 3 --mtp-draft-vocab-size 64 --resume")
    args = settings(model, tmp_path / "run", *flags, "--drafter-init", "random")
    assert command_of("start", args) is None
    assert f"--load {tmp_path}/run/trunk" in " ".join(command_of("train", args) or [])


def test_a_fit_of_a_block_drafter_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attach.main([str(model), "texts", str(tmp_path), "--drafter", "dspark", "--drafter-init", "fitted"], "attach")
    assert "--drafter-init fitted needs an EAGLE-3 drafter (--drafter eagle3)" in capsys.readouterr().err


def test_a_drafter_with_mtp_layers_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--mtp-layers", "2"], ["--unroll", "2"], ["--mtp-init", "random"]):
        with pytest.raises(SystemExit):
            attach.main([str(model), "texts", str(tmp_path / "run"), "--drafter", "dspark", *flags], "attach")
        assert f"--drafter dspark was given with {flags[0]}, which is of MTP layers; drop" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        attach.main([str(model), "texts", "run", "--drafter", "dflash", "--token-fraction", "0.5"], "attach")
    assert "--token-fraction was given with --drafter dflash, whose blocks are --drafter-b" in capsys.readouterr().err


def test_own_texts_are_sampled_from_the_trunk_and_trained_on(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = settings(model, run, "--self-generated", "200", "--temperature", "0", "--anywhere")
    words = command_of("sample", args)
    assert words is not None
    parse("megatron-mtp", *words)
    given = dict(pairwise(words))
    assert (given["--load"], given["--data-path"]) == (str(run / "trunk"), str(run / "data/corpus"))
    assert (given["--texts"], given["--temperature"], given["--dtype"]) == ("200", "0", "bfloat16")
    assert "--anywhere" in words
    for name in ("before", "train"):
        training = command_of(name, args)
        assert training is not None
        assert training[training.index("--data-path") + 1] == given["--output-prefix"] == str(run / "data/own")


def test_own_texts_can_be_written_by_a_server(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = settings(model, tmp_path / "run", "--self-generated", "200", "--texts-by", "http://localhost:8000")
    words = command_of("sample", args)
    assert words is not None
    asked = of_sample("sample").parse_args(words[1:])
    assert (asked.server, asked.load, asked.dtype) == ("http://localhost:8000", None, None)
    assert asked.tokenizer == model
    with pytest.raises(SystemExit, match="2"):
        cli.main(["attach", str(model), "texts", str(tmp_path / "run"), "--texts-by", "http://localhost:8000"])
    assert "--texts-by was given without --self-generated; give the number" in capsys.readouterr().err


def trained_run(run: Path, before: dict[str, list[int]], after: dict[str, list[int]]) -> None:
    """Create a run whose layers were measured before and after training: accepted tokens out of ten, per document and
    source.
    """
    for folder, sources in ((run / "before", before), (run, after)):
        folder.mkdir(parents=True, exist_ok=True)
        numbers = iter(range(99))
        counted = {
            name: {next(numbers): AcceptanceStats(0, 0, [each], [10], [10]) for each in documents}
            for name, documents in sources.items()
        }
        write_documents(folder, 4, counted)
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "mtp_acceptance.json").write_text(json.dumps({"acceptance": [0.5]}))


MIXED = [2, 8, 4, 6, 3, 7, 5, 5]
"""Accepted tokens out of ten in eight documents: 1.500 tokens per forward pass."""


@pytest.mark.parametrize(("fallen", "donor"), [("all", None), ("all", "glm"), ("chat", None), ("none", None)])
def test_mtp_layers_that_draft_worse_than_before_are_not_exported(
    fallen: str, donor: str | None, model: Path, tmp_path: Path
) -> None:
    less, more = [each - 1 for each in MIXED], [each + 2 for each in MIXED]
    after = {"all": (less, less), "chat": (more, less), "none": (MIXED, MIXED)}[fallen]
    trained_run(tmp_path / "run", {"code": MIXED, "chat": MIXED}, dict(zip(("code", "chat"), after, strict=True)))
    args = settings(model, tmp_path / "run", *(["--donor", donor] if donor else []))
    if fallen == "none":
        check_gain(args)
        return
    said = "those of --donor" if donor else "at their start"
    where = "all text" if fallen == "all" else "chat"  # it has improved on code and on all text
    with pytest.raises(ValueError, match=rf"worse than {said} on {where}: 1.400 .* 1.500 .*--allow-w"):
        check_gain(args)
    check_gain(replace(args, allow_worse=True))
    record = json.loads((tmp_path / "run/checkpoint/mtp_acceptance.json").read_text())
    assert record["acceptance"] == [0.5]
    assert record["before"]["expected accepted length"] == 1.5
    assert record["before"]["is worse"] is True
    assert (record["before"]["donor"] or "").endswith(donor or "")


def test_a_loss_within_its_error_is_not_a_regression(model: Path, tmp_path: Path) -> None:
    """Half of the documents gain as much as the others lose, except for one token."""
    after = [each + (2 if place % 2 else -2) for place, each in enumerate(MIXED)]
    trained_run(tmp_path / "run", {"text": MIXED}, {"text": [after[0] - 1, *after[1:]]})
    check_gain(settings(model, tmp_path / "run"))
    record = json.loads((tmp_path / "run/checkpoint/mtp_acceptance.json").read_text())
    assert record["before"]["is worse"] is False
    assert 0.1 < record["before"]["error"] < 0.2


@pytest.mark.parametrize(("after", "worse"), [(1.91, False), (1.89, True), (1.85, True)])
def test_a_drop_beyond_the_stated_error_is_worse(after: float, worse: bool) -> None:
    """The stated error is already two standard errors."""
    assert Gain(2.0, after, 0.1).is_worse == worse


def test_the_error_names_the_source_that_has_fallen_most(model: Path, tmp_path: Path) -> None:
    begun = dict.fromkeys(("code", "chat", "web"), MIXED)
    after = {name: [each + more for each in MIXED] for name, more in (("code", -1), ("chat", -2), ("web", 3))}
    trained_run(tmp_path / "run", begun, after)
    with pytest.raises(ValueError, match=r"worse than at their start on chat: 1\.300"):
        check_gain(settings(model, tmp_path / "run"))


def test_a_gain_is_that_of_the_documents_of_both_evaluations() -> None:
    before, after = (
        {"text": {number: AcceptanceStats(0, 0, [number], [10], [10]) for number in numbers}}
        for numbers in ((3, 5, 7), (7, 5, 9))
    )
    assert gains(before, after)["all text"][:2] == (1.6, 1.6)


def test_the_record_says_what_training_gained(model: Path, tmp_path: Path) -> None:
    trained_run(tmp_path / "run", {"a": MIXED, "b": MIXED}, {"a": MIXED, "b": [each + 1 for each in MIXED]})
    (tmp_path / "run" / "probe.json").write_text('{"chosen": {"rate": "1e-3"}}')
    check_gain(settings(model, tmp_path / "run"))
    record = json.loads((tmp_path / "run/checkpoint/mtp_acceptance.json").read_text())
    assert record["before"]["is worse"] is False
    assert record["before"]["text"] == "texts"
    assert record["before"]["sources"].keys() == {"a", "b"}
    assert record["probe"] == {"chosen": {"rate": "1e-3"}}


# --- the budget and the probe ----------------------------------------------------------------------------------------


def finish_trial(words: list[str] | None, length: float) -> str:
    """Finish a trial as its evaluation does; return the folder's name."""
    assert words is not None
    folder = Path(words[words.index("--mtp-metrics-dir") + 1])
    folder.mkdir(parents=True)
    row = {"iteration": 1, "split": "validation", "expected accepted length": length}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder.name


@pytest.mark.parametrize("steps", [1, 600, 6000, 100_000])
@pytest.mark.parametrize("flags", [(), ("--loss", "kd"), ("--learning-rate", "1e-3"), ("--evaluated-batches", "64")])
def test_probe_and_guard_cost_at_most_15_percent_of_the_steps(
    steps: int, flags: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    """Counted from the commands, with a step and an evaluated batch costing the same; the guard has at least three
    evaluations.
    """
    args = settings(model, tmp_path / "run", "--steps", str(steps), *flags)

    def number(words: list[str], flag: str) -> int:
        return int(words[len(words) - 1 - words[::-1].index(flag) + 1])

    spent = 0
    while (words := command_of("probe", args)) is not None:
        parse("megatron-mtp", *words)
        assert number(words, "--eval-interval") > number(words, "--train-iters"), "after its last step alone"
        spent += number(words, "--train-iters") + number(words, "--eval-iters")
        finish_trial(words, 1.5)
    assert spent == budget_of(args).probe
    train = command_of("train", args)
    assert train is not None
    evaluations = 2 + steps // number(train, "--eval-interval")  # including before and after training
    spent += evaluations * number(train, "--eval-iters")
    assert spent <= max(0.15 * steps, 3 * int(args.evaluated_batches))
    assert bool(budget_of(args).probe) == (steps >= (100_000 if "--evaluated-batches" in flags else 6000))


def test_the_shortest_training_with_a_probe_has_trials_of_fifty_steps(model: Path, tmp_path: Path) -> None:
    args = settings(model, tmp_path / "run")
    budgets = (budget_of(replace(args, steps=steps)) for steps in range(1000, 6000))
    assert next(budget.rounds for budget in budgets if budget.rounds) == ((6, 50), (3, 100))


def test_the_better_half_is_trained_again_and_the_best_is_chosen(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = settings(model, tmp_path / "run", "--steps", "6000")
    lengths = iter([1.5, 1.2, 1.4, 1.6, 1.3, 1.1, 1.7, 1.9, 1.8])
    ran = []
    while (words := command_of("probe", args)) is not None:
        ran.append(finish_trial(words, next(lengths)).rpartition("-")[0])
    assert ran[:6] == ["kd-5e-4", "kd-1.5e-3", "kd-1.5e-4", "lk-5e-4", "lk-1.5e-3", "lk-1.5e-4"]
    assert ran[6:] == ["lk-5e-4", "kd-5e-4", "kd-1.5e-4"]
    train = command_of("train", args) or []
    assert (train[train.index("--lr") + 1], train[train.index("--mtp-loss") + 1]) == ("5e-4", "kd")
    table = keep_table(args)
    assert table is not None
    assert json.loads((tmp_path / "run" / "probe.json").read_text()) == table
    assert table["chosen"] == {"rate": "5e-4", "loss": "kd"}
    assert [row["expected accepted length"] for row in table["trials"]] == [1.5, 1.2, 1.4, 1.6, 1.3, 1.1, 1.7, 1.9, 1.8]
    assert capsys.readouterr().out.splitlines()[-2].split() == [">", "5e-4", "kd", "128", "1.900"]


def test_trials_of_an_array_are_those_of_the_first_round(model: Path, tmp_path: Path) -> None:
    args = settings(model, tmp_path / "run", "--steps", "6000", "--only", "probe", "--trial", "4")
    assert finish_trial(command_of("probe", args), 1.0).startswith("lk-1.5e-3-")
    assert command_of("probe", args) is None, "which is finished"


def test_a_trial_that_fails_is_the_worst(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A diverging loss ends its own command but not the probe."""
    args, ran = settings(model, tmp_path / "run", "--steps", "6000", "--loss", "kd"), []

    def run(step: Step, args: AttachSettings) -> int:
        ran.append(step.left_command(args) or [])
        if "1.5e-3" in ran[-1]:
            return 1
        finish_trial(ran[-1], 1.5)
        return 0

    monkeypatch.setattr(attach, "_run", run)
    assert attach._probe(args) == 0
    assert [words[words.index("--lr") + 1] for words in ran] == ["5e-4", "1.5e-3", "1.5e-4", "5e-4", "1.5e-4"]
    trials = json.loads((tmp_path / "run" / "probe.json").read_text())["trials"]
    assert [row["expected accepted length"] for row in trials] == [1.5, 0, 1.5, 1.5, 1.5]


# --- a Megatron checkpoint as the trunk ------------------------------------------------------------------------------


def test_attaching_to_a_megatron_trunk_never_loads_the_whole_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing loads the whole model: no fit, no logit comparison, no drafting in one process."""
    trunk = tmp_path / "trunk"
    trunk.mkdir()
    given = ["--load", str(trunk)]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["attach", str(model), "texts", str(tmp_path / "run"), *given])
    assert f"--load is {trunk}, which is not a Megatron checkpoint; give one of" in capsys.readouterr().err
    (trunk / TRACKER).write_text("3")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["attach", str(model), "texts", str(tmp_path / "run"), *given, "--mtp-init", "fitted"])
    assert "--mtp-init was given with --load, for trunks too large for one machine" in capsys.readouterr().err
    args = settings(model, tmp_path / "run", *given)
    left_out = [name for name in STEPS if command_of(name, args) is None]
    assert left_out == ["trunk", "sample", "probe", "verify", "draft"]
    start = command_of("start", args) or []
    assert start[:3] == ["convert", "attach-mtp", str(trunk)]
    assert start[start.index("--mtp-init") + 1] == "last-layer"


def test_a_schedule_of_losses_reaches_the_training(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = command_of("train", settings(model, tmp_path / "run", "--loss", "lk:0.7,e2e_tv:0.3")) or []
    assert train[train.index("--mtp-loss") + 1] == "lk:0.7,e2e_tv:0.3"
    for loss, says in (
        ("lk:0.7", "--loss is 'lk:0.7'; give one loss, or several with their parts of the training steps, numbers"),
        ("lk:0.7,mix:0.3", "--loss is 'lk:0.7,mix:0.3'; choose among ce, kd, tv, nla, lk, e2e_tv, dpace."),
        ("mse", "--loss is 'mse'; choose among ce, kd, tv, nla, lk, e2e_tv, dpace."),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["attach", str(model), "texts", str(tmp_path / "run"), "--loss", loss])
        said = capsys.readouterr().err
        assert (says in said, said.count("\n")) == (True, 1), said


def test_held_out_text_is_not_used_in_training_or_sampling(model: Path, tmp_path: Path) -> None:
    args = settings(model, tmp_path / "run", "--self-generated", "200")
    split = "98,2,0"  # the last documents are for validation in every command
    for name in ("before", "train"):
        training = command_of(name, args)
        assert training is not None
        assert [training[place + 1] for place, word in enumerate(training) if word == "--split"] == [split]
    words = command_of("sample", args)
    assert words is not None
    asked = of_sample("sample").parse_args(words[1:])
    assert (asked.split, asked.part) == (split, "training")


def test_conversations_are_answered(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    args = replace(settings(model, tmp_path / "run", "--self-generated", "200"), corpus=str(chats))
    words = command_of("sample", args)
    assert words is not None
    assert words[words.index("--chat") + 1] == str(chats)
    assert command_of("corpus", args) is None
    assert "last-layer" in (command_of("start", args) or [])
    with pytest.raises(SystemExit, match="2"):
        cli.main(["attach", str(model), str(chats), "--self-generated", "200", "--mtp-init", "fitted"])
    assert "--mtp-init fitted needs plain text, and the corpus has only chats" in capsys.readouterr().err


def test_flags_of_chats_reach_the_corpus(model: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    given = settings(model, tmp_path / "run", "--chat-skip-bad-lines", "--chat-mask-history")
    args = replace(given, corpus=str(chats))
    words = command_of("corpus", args)
    assert words is not None
    assert words[-2:] == ["--chat-skip-bad-lines", "--chat-mask-history"]
    assert not {"--chat-skip-bad-lines", "--chat-mask-history"} & set(command_of("train", args) or [])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--num-steps", "30"], "--steps"),
        (["--tensor-model-parallel-sise", "2"], "--tensor-model-parallel-size"),
        (["--train-iters", "12"], "give --steps"),
        (["--mtp_num_layers=2"], "give --mtp-layers"),
        (["another-corpus"], "another-corpus"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_flags_that_no_step_takes_are_refused_before_the_first(
    flags: list[str], named: str, dry: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        attach.main([str(model), "texts", str(tmp_path / "run"), *flags, *dry], "attach")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert named in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("longest", [40, 5])
def test_held_out_text_is_drafted_at_the_end(longest: int, model: Path, tmp_path: Path) -> None:
    give_tokenizer(model)
    (tmp_path / "run" / "data").mkdir(parents=True)
    documents = [[3 + number % 7] * (longest - number % 2) for number in range(100)]
    write_dataset(tmp_path / "run" / "data" / "corpus", documents)
    STEPS["draft"].prepare(settings(model, tmp_path / "run"))
    command = command_of("draft", settings(model, tmp_path / "run")) or []
    file = Path(command[command.index("--prompt-file") + 1])
    prompts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    tokenizer = read_tokenizer(model)
    held_out = {tokenizer.decode(document[: 32 if longest > 32 else 1]) for document in documents[98:]}
    assert set(prompts) <= held_out
    asked = command_of("draft", settings(model, tmp_path / "run", "--prompt", "a text")) or []
    assert asked[asked.index("--prompt") + 1] == "a text"


def test_mtp_layers_are_initialized_as_requested(model: Path, tmp_path: Path) -> None:
    for flags, init in ([], "fitted"), (["--self-generated", "99"], "fitted"), (["--mtp-init", "random"], "random"):
        args = settings(model, tmp_path / "run", *flags)
        words = command_of("start", args) or []
        made = of_convert("convert").parse_args(words[1:])
        fitted_to = str(tmp_path / "run/data/corpus") if init == "fitted" else None
        assert (made.mtp_init, made.data_path) == (init, fitted_to)
        assert args.more == []


def test_the_layers_of_a_donor_are_grafted_on_the_model(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = settings(model, run, "--donor", "donor", "--self-generated", "99")
    commands = {name: command_of(name, args) or [] for name in STEPS}
    for words in filter(None, commands.values()):
        parse("megatron-mtp", *words)
    assert commands["trunk"] == []  # the graft reads the folder itself, whose config may count missing layers
    assert commands["start"][:5] == ["convert", "graft", "donor", str(model), str(run / "start")]
    assert dict(pairwise(commands["sample"]))["--load"] == str(run / "start")
    assert "--family" not in commands["export"]


@pytest.mark.usefixtures("megatron")
def test_a_donor_decides_the_number_of_layers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = commands(monkeypatch)
    folders = {count: make(tmp_path / f"donor-{count}", "mimo", count) for count in (1, 3)}
    bare = make(tmp_path / "bare", "qwen2", 0)
    for count, passes in ((1, "--mtp-use-repeated-layer"), (3, "--mtp-train-only")):
        started.clear()
        assert (
            cli.main(["attach", str(model), "texts", str(tmp_path / f"{count}"), "--donor", str(folders[count])]) == 0
        )
        training = next(words for words in started if "train" in words)
        assert training[training.index("--mtp-num-layers") + 1 :][:2] == [str(count), passes]
    capsys.readouterr()
    for flags, says in (
        (["--mtp-init", "donor"], "--mtp-init donor needs --donor MODEL"),
        (["--mtp-init", "random", "--donor", "donor"], "--donor was given with --mtp-init random; leave one of them"),
        (["--donor", str(folders[3]), "--mtp-layers", "2"], "--mtp-layers is 2, and"),
        (["--donor", str(folders[3]), "--unroll", "2"], "--mtp-layers is 3 with --unroll"),
        (["--donor", str(bare)], "bare, which has no MTP layers; give a model that has some."),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["attach", str(model), "texts", str(tmp_path / "run"), *flags])
        said = capsys.readouterr().err
        assert (says in said, said.count("\n")) == (True, 1), said


def test_a_run_inside_the_model_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["attach", str(model), "texts", str(model / "run"), "--dry-run"])
    assert "which it is made from; name a place outside of it" in capsys.readouterr().err


def test_other_settings_than_those_of_a_run_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise finished steps of another model, corpus or kind of layers would be reused."""
    started, run = commands(monkeypatch), tmp_path / "run"
    given = ["attach", str(model), "texts", str(run)]
    assert cli.main([*given, "--steps", "10"]) == 0
    assert cli.main([*given, "--steps", "20"]) == 0, "a training that goes on"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    begun = f"{run} was begun with"
    for words, says in (
        (["attach", str(tmp_path / "other"), "texts", str(run)], f"{begun} MODEL {model}; give the same to continue"),
        (["attach", str(model), "prose", str(run)], f"{begun} CORPUS {Path('texts').absolute()}; give"),
        ([*given, "--self-generated", "100", "--loss", "tv"], f"{begun} no --loss, no --self-generated; give"),
        ([*given, "--self-generated", "9"], "--self-generated is 9; give 25 or more"),
    ):
        started.clear()
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)
        said = capsys.readouterr().err
        assert (says in said, said.count("\n"), started) == (True, 1, []), said
    (run / RECORD).write_text("[]")
    with pytest.raises(SystemExit, match="2"):
        cli.main([*given, "--dry-run"])
    assert "attach.json is damaged (TypeError" in capsys.readouterr().err


def test_overwrite_starts_a_run_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands(monkeypatch)
    run = tmp_path / "run"
    given = ["attach", str(model), "texts", str(run), "--overwrite"]
    finish(run)
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / RECORD).write_text("{}")
    (tmp_path / "all" / "texts").touch()
    for words, says in (
        (given, f"{run} has no attach.json, so attach did not make it; name another RUN."),
        ([*given, "--dry-run"], "--overwrite was given with --dry-run, which removes nothing; leave"),
        ([*given, "--only", "train"], "--overwrite was given with --only, which removes nothing; leave"),
        (["attach", str(model), str(tmp_path / "all/texts"), str(tmp_path / "all"), "--overwrite"], "would delete"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)
        assert says in capsys.readouterr().err
    assert (run / "trunk").is_dir()
    assert (tmp_path / "all" / "texts").exists()
    assert cli.main(given[:-1]) == 0
    assert cli.main([*given, "--loss", "tv"]) == 0
    assert [path.name for path in run.iterdir()] == [RECORD]
    assert json.loads((run / RECORD).read_text())["loss"] == "tv"


def test_a_dry_run_prints_every_step_and_does_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = commands(monkeypatch)
    finish(tmp_path / "run")
    os.utime(tmp_path / "run" / "exported" / "config.json", (1, 1))
    assert cli.main(["attach", str(model), "texts", str(tmp_path / "run"), "--dry-run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(STEPS)
    assert shown[1] == "> the trunk in Megatron's form: finished"
    assert any("megatron-mtp train --use-checkpoint-args" in one for one in shown)
    assert started == []
    assert (tmp_path / "run" / "exported" / "config.json").exists()


def test_a_trunk_without_a_family_is_rejected_before_training(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = commands(monkeypatch)
    (tmp_path / "run" / "start").mkdir(parents=True)

    def refused(*_: object, **__: object) -> None:
        raise ValueError("no family has its norms.")

    monkeypatch.setattr("megatron_mtp.checkpoint.convert.hf_form.form_of", refused)
    given = ["attach", str(model), "texts", str(tmp_path / "run")]
    assert cli.main(given) == 0
    assert [
        words[words.index("megatron_mtp") + 1] for words in started
    ] == "preprocess convert train train generate".split()
    shown = capsys.readouterr()
    assert "no Hugging Face folder can hold this model with MTP layers (no family has its norms.)" in shown.err
    assert f"> Megatron checkpoint: {tmp_path}/run/checkpoint" in shown.out
    assert cli.main([*given, "--only", "export"]) == 0
    assert capsys.readouterr().err.startswith("> warning: ")


def finish(run: Path) -> None:
    """Leave the folder as all steps would."""
    for folder in ("trunk", "start", "before", "checkpoint", "exported"):
        (run / folder).mkdir(parents=True)
    (run / "before" / "documents.json").write_text('{"sources": {}}')
    (run / "checkpoint" / TRACKER).write_text("600")
    (run / "exported" / "config.json").touch()


def test_finished_steps_are_not_repeated(model: Path, tmp_path: Path) -> None:
    args = settings(model, tmp_path)
    finish(tmp_path)
    left = {name for name in STEPS if command_of(name, args)}
    assert left == {"corpus", "train", "verify", "draft"}  # they detect it themselves, or are cheap
    (tmp_path / "before" / "documents.json").unlink()
    assert command_of("before", args)
    training = command_of("train", args)
    assert training is not None
    assert training[training.index("--load") + 1] == str(tmp_path / "checkpoint")
    assert "--finetune" not in training


def test_a_folder_that_is_older_than_the_checkpoint_is_exported_again(model: Path, tmp_path: Path) -> None:
    finish(tmp_path)
    os.utime(tmp_path / "exported" / "config.json", (1, 1))
    assert command_of("export", settings(model, tmp_path)) is not None
    STEPS["export"].prepare(settings(model, tmp_path))
    assert not (tmp_path / "exported").exists()


def commands(monkeypatch: pytest.MonkeyPatch, failing: str = "none") -> list[list[str]]:
    """Return the commands that are started from now on; one that contains this word fails."""
    started: list[list[str]] = []

    def run(command: list[str]) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(returncode=3 if failing in command else 0)

    monkeypatch.setattr(attach, "subprocess", SimpleNamespace(run=run))
    return started


def test_steps_run_as_processes_and_training_uses_the_launcher(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = commands(monkeypatch)
    monkeypatch.setattr(attach_checks.shutil, "which", lambda name: name)
    flags = [str(model), "texts", str(tmp_path / "run"), "--launch", "torchrun --nproc-per-node 8"]
    assert cli.main(["attach", *flags]) == 0
    assert [words[words.index("megatron_mtp") + 1] for words in started] == ORDER
    ranks = [words[0] == "torchrun" for words in started]
    assert ranks == [verb == "train" for verb in ORDER]
    assert started[0][:3] == [sys.executable, "-m", "megatron_mtp"]


def test_a_step_that_fails_ends_the_others(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = commands(monkeypatch, failing="attach-mtp")
    assert cli.main(["attach", str(model), "texts", str(tmp_path / "run")]) == 3
    assert len(started) == 3


@pytest.mark.usefixtures("megatron")
def test_a_corpus_with_too_few_documents_is_rejected_before_the_fit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 % of three documents is zero documents."""
    started, run = commands(monkeypatch), tmp_path / "run"
    (run / "data").mkdir(parents=True)
    prefix = write_dataset(run / "data/corpus", [[5, 6, 0], [9, 0], [7, 0]])
    with pytest.raises(SystemExit, match="2"):
        cli.main(["attach", str(model), "texts", str(run)])
    assert f"--split is 98,2,0, which of the 3 documents of '{prefix}' leaves none for val" in capsys.readouterr().err
    assert len(started) == 1, "the corpus alone"
    give_tokenizer(model)
    assert cli.main(["attach", str(model), "texts", str(run), "--split=50,50,0"]) == 0


def test_one_step_alone_runs_in_this_process(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str]]] = []

    def module_of(verb: str) -> SimpleNamespace:
        return SimpleNamespace(main=lambda words, program: ran.append((verb, words)) or 5)

    monkeypatch.setattr(attach, "module_of", module_of)
    given = [str(model), "texts", str(tmp_path / "run"), "--only"]
    assert attach.main([*given, "verify"], "attach") == 5
    assert [(verb, words[:3]) for verb, words in ran] == [
        ("convert", ["verify", str(tmp_path / "run/exported"), str(tmp_path / "run/checkpoint")])
    ]
    finish(tmp_path / "run")
    assert attach.main([*given, "trunk"], "attach") == 0  # it is finished
    assert len(ran) == 1


def test_a_folder_without_a_model_gives_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["attach", str(tmp_path), "texts"])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"megatron-mtp attach: error: {tmp_path} has no config.json; give ")


# --- names on the Hub -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("Qwen/Qwen3-0.6B@v1.0", True),
        ("models", False),
        ("/models/qwen", False),
        ("./models/qwen", False),
        ("a/b/c", False),
        ("tests/unit", False),  # a local folder
        ("tests/no_such", False),  # its parent exists: a misspelled path
    ],
)
def test_a_hub_name_is_told_from_a_path(name: str, is_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert hub.is_hub_name(name) is is_name
    if not is_name:
        assert hub.local_folder(name) == Path(name)


def test_a_model_is_downloaded_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(repo: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.local_folder("Qwen/Qwen3-0.6B@main") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("Qwen/Qwen3-0.6B", "main")
    assert not {"*.py", "*.bin", "*.pt"} & set(asked["patterns"])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("LocalEntryNotFoundError", "the Hub cannot be reached, and the model is not in the cache; give a folder."),
        ("OfflineModeIsEnabled", "HF_HUB_OFFLINE is set"),
        ("RepositoryNotFoundError", "there is no such model; check the name"),
        ("GatedRepoError", "its owner has to grant access"),
        ("SomethingElse", "the reason in lines; try again, or give a folder."),
    ],
)
def test_a_failed_download_gives_a_clear_error(kind: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise type(kind, (Exception,), {})("the reason\nin lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=r"^Qwen/Qwen3-0\.6B could not be downloaded") as refused:
        hub.local_folder("Qwen/Qwen3-0.6B")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_names_of_the_hubs_errors_are_those_of_its_package() -> None:
    import huggingface_hub.errors

    assert [name for name in hub.REASONS if not hasattr(huggingface_hub.errors, name)] == []


# --- the installed package ------------------------------------------------------------------------------------------


def test_the_wheel_has_all_that_the_verbs_need(tmp_path: Path) -> None:
    """Build the wheel, unpack it, and run it in its own folder, without the repository."""
    root = Path(__file__).parents[3]
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("megatron_mtp", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(root / name)
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    packaged = {str(path.relative_to(site)) for path in site.rglob("*.py")}
    assert packaged == {str(path.relative_to(root)) for path in (root / "megatron_mtp").rglob("*.py")}
    recipes = root / "megatron_mtp" / "training" / "recipes"
    assert {file.name for file in recipes.glob("*.yaml")} == {file.name for file in site.rglob("recipes/*.yaml")}
    code = "import megatron_mtp; print(megatron_mtp.__file__); from megatron_mtp.cli import main as cli, verbs; "
    code += "[verbs.module_of(verb).parser(verb).format_help() for verb in verbs.VERBS if verb != 'train']; "
    code += "cli.main(['attach', 'nowhere', 'texts'])"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(site / "megatron_mtp" / "__init__.py")
    assert "attach: error: nowhere has no config.json" in done.stderr


BAD = {
    "--mtp-layers 0": "--mtp-layers is 0; give 1 or more.",
    "--unroll 0": "--unroll is 0; give 1 or more.",
    "--unroll 5 --depths 2": "--mtp-layers is 2 with --unroll, which trains one layer; leave one of them out.",
    "--steps -1": "--steps is -1; give 1 or more.",
    "--save-every 0": "--save-every is 0; give 1 or more.",
    "--learning-rate x": "--learning-rate is x; give a number above 0.",
    "--token-fraction 2": "--token-fraction is 2; give a number above 0, and at most 1.",
    "--evaluated-batches 0": "--evaluated-batches is 0; give 1 or more.",
    "--family gpt5": "--family is 'gpt5'; give one of deepseek_v3, glm4_moe,",
    "--launch a'b": "--launch is 'a'b', which is not a command (No closing quotation); correct it.",
    "--launch=": "--launch is '', and this machine has no such program; correct it.",
    "--launch no-such-launcher": "--launch is 'no-such-launcher', and this machine has no such program",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_of_a_later_step_are_rejected_before_the_first(
    flags: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = commands(monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["attach", str(model), "texts", str(tmp_path / "run"), *flags.split(" ")])
    assert BAD[flags] in capsys.readouterr().err
    assert started == []
