"""--config: a file of flags equals the corresponding command line, and mistakes in it are one sentence."""

from argparse import ArgumentParser, BooleanOptionalAction
from pathlib import Path

import pytest

from megatron_mtp.cli.train import parse_run
from megatron_mtp.training.config_file import flags_of, without_unset

FILE = """
model:
  num-layers: 4
  swiglu: true            # a switch
  bf16: false
  position_embedding_type: rope
data: {data-path: [0.7, a, 0.3, b]}
split: 90,10,0
lr: 1e-3                  # as written, not 0.001
rope: no
seed:
"""


@pytest.fixture
def parser() -> ArgumentParser:
    made = ArgumentParser()
    for flag in ("num-layers", "position-embedding-type", "split", "lr", "seed", "lr-decay-style"):
        made.add_argument(f"--{flag}")
    made.add_argument("--data-path", nargs="*")
    made.add_argument("--swiglu", action="store_true")
    made.add_argument("--bf16", action="store_true")
    made.add_argument("--rope", action=BooleanOptionalAction)
    return made


def test_a_config_file_equals_its_command_line(parser: ArgumentParser, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    words = flags_of(tmp_path / "run.yaml", parser)
    expected = (
        "--num-layers 4 --swiglu --position-embedding-type rope --data-path 0.7 a 0.3 b --split 90,10,0 --lr 1e-3"
    )
    assert words == [*expected.split(), "--no-rope"]
    assert parser.parse_args([*words, "--lr", "2e-3"]).lr == "2e-3"  # the command line takes precedence


def test_the_command_line_can_unset_a_switch_of_the_config_file(parser: ArgumentParser) -> None:
    words = ["--num-layers", "4", "--swiglu", "--bf16", "--rope", "--lr", "1"]
    left, typed = without_unset(words, ["--no-swiglu", "--seed", "2", "--no-rope", "--no-lr", "--no-fp8"], parser)
    assert left == ["--num-layers", "4", "--bf16", "--rope", "--lr", "1"]
    assert typed == ["--seed", "2", "--no-rope", "--no-lr", "--no-fp8"]  # separate flags, or flags that do not exist
    assert parser.parse_args([*left, *typed[:3]]).rope is False


def test_an_empty_config_file_gives_no_flags(parser: ArgumentParser, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert flags_of(tmp_path / "run.yaml", parser) == []


@pytest.mark.parametrize("text", ["a: &a {b: *a}", "a: " + "{a: " * 5000 + "1" + "}" * 5000])
def test_sections_without_an_end(text: str, parser: ArgumentParser, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"whose sections are nested too deeply; write fewer levels.$"):
        flags_of(tmp_path / "run.yaml", parser)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num-layer: 4", "line 1: there is no flag --num-layer; did you mean --num-layers?"),
        ("x: {y: 1}", "line 1: there is no flag --y; --help-megatron lists all flags."),
        ("a:\n  lr: 1\nb:\n  lr: 2", "line 4: 'lr' is in line 2 already; remove one of the two."),
        ("lr_decay_style: [a, b]", "line 1: --lr-decay-style does not take a list; give one value."),
        ("data-path: [[a]]", "line 1: --data-path does not take a list"),
        ("swiglu: 3", "line 1: --swiglu is a switch, and was given '3'; give true or false."),
        ("\nverbose: true", "line 2: 'verbose' cannot be in a file; give --verbose on the command line."),
        ("lr: [", "cannot be read as YAML"),
        ("- lr", "holds no keys with values; write lines such as 'num-layers: 4'"),
        ("[a]: 1", "line 1: a key is not a name of a flag"),
    ],
)
def test_mistakes_in_a_config_file_give_a_clear_error(
    text: str, says: str, parser: ArgumentParser, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^--config") as refused:
        flags_of(tmp_path / "run.yaml", parser)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_config_file_is_rejected(parser: ArgumentParser, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read as YAML"):
        flags_of(tmp_path / "none.yaml", parser)


def test_the_flags_of_the_run_are_taken_from_those_of_megatron() -> None:
    given, rest = parse_run("train", "--lr 1 --verbose --config run.yaml --dry-run 8 --config-logger-dir x".split())
    assert (given.verbose, given.config, given.dry_run) == (True, "run.yaml", 8)
    assert rest == "--lr 1 --config-logger-dir x".split()
    assert parse_run("train", ["--dry-run", "--lr", "1"])[0].dry_run == 0
    assert parse_run("train", [])[0].dry_run is None
