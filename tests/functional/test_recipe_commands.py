"""Every recipe starts training with the settings that it names; command-line flags win."""

from pathlib import Path

import launch
import pytest
from tiers import tiered

from megatron_mtp.cli import attach
from megatron_mtp.cli import recipes as verb
from megatron_mtp.cli.attach_probe import choice
from megatron_mtp.cli.attach_training import training_of
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.training import recipe

prepare()

WITHOUT_RATE = [word for word in launch.PLAIN_RUN if word not in ("--lr", "1e-3")]
RUN = [*WITHOUT_RATE, "--num-layers", "6", *"--train-iters 2 --eval-iters 0 --eval-interval 2".split()]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trunk")
    saved = f"--lr 1e-3 --save {folder}/checkpoint --save-interval 2".split()
    launch.run(launch.python("pretrain_gpt.py", *RUN, *saved), folder / "log")
    return folder / "checkpoint"


@pytest.mark.parametrize("name", tiered(recipe.names(), ("nemotron-mtp-boost", "dspark")))
def test_a_recipe_trains(name: str, trunk: Path, tmp_path: Path) -> None:
    chosen = recipe.read(name)
    words = f"--recipe {name} --load {trunk} --finetune --mtp-metrics-dir {tmp_path} --log-interval 1".split()
    words += [] if "drafter" in chosen.settings else ["--mtp-init", "last-layer"]
    words += [] if "lr" in chosen.settings else ["--lr", "1e-3"]
    log = launch.run(launch.python("pretrain_gpt.py", *RUN, *words), tmp_path / "log")
    assert f"> recipe {name} sets {recipe.shown(chosen.settings)}\n" in log
    assert "overrides" not in log
    assert sorted(launch.learned(tmp_path)) == [1, 2]


def test_command_line_flags_override_a_recipe(trunk: Path, tmp_path: Path) -> None:
    words = f"--recipe angelspec --load {trunk} --finetune --mtp-init random --mtp-metrics-dir {tmp_path}".split()
    words += "--log-interval 1 --lr 3e-3 --mtp-loss tv --min-lr=0".split()
    log = launch.run(launch.python("pretrain_gpt.py", *RUN, *words), tmp_path / "log")
    assert "> the command line overrides its --mtp-loss --lr --min-lr\n" in log
    assert '"lr": 0.003' in (tmp_path / "run.json").read_text()
    assert '"mtp_loss": "tv"' in (tmp_path / "run.json").read_text()


def test_settings_are_flags_of_train_under_their_own_names() -> None:
    from megatron_mtp.cli.train import full_parser

    known = full_parser("train")._option_string_actions
    wrong = {
        f"{name}: --{flag}"
        for name in recipe.names()
        for flag in recipe.read(name).settings
        if f"--{flag}" not in known or known[f"--{flag}"].dest != flag.replace("-", "_")
    }
    assert not wrong


def attached(tmp_path: Path, *flags: str) -> list[str]:
    """Return the flags of the training that `attach` starts with these flags."""
    (tmp_path / "hf").mkdir(exist_ok=True)
    given = attach.given_settings([str(tmp_path / "hf"), "texts", str(tmp_path / "run"), *flags], "attach")
    return training_of(given, choice(given), 100)


def test_attach_trains_by_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(attached(tmp_path, "--recipe", "nemotron-mtp-boost"))
    assert "--mtp-unroll 7 " in words
    assert "--mtp-loss kd " in words
    assert words.endswith("--mtp-hidden-state-mixing --mtp-temperature=2")
    assert "> recipe nemotron-mtp-boost sets --mtp-num-layers 1" in capsys.readouterr().out

    words = " ".join(attached(tmp_path, "--recipe", "angelspec", "--unroll", "2", "--learning-rate", "1e-3"))
    assert "--mtp-unroll 2 --mtp-train-only" in words
    assert "--mtp-loss lk:0.7,e2e_tv:0.3 " in words
    assert "--lr 1e-3 " in words
    assert "--lr-warmup-iters" not in words
    assert "> the command line overrides its --mtp-unroll --lr\n" in capsys.readouterr().out

    words = " ".join(attached(tmp_path, "--loss", "kd", "--recipe", "dspark"))
    assert "--drafter dspark --mtp-loss kd " in words
    assert "mix" not in words


def test_attach_takes_no_passes_of_a_recipe_with_layers_of_its_own(tmp_path: Path) -> None:
    words = " ".join(attached(tmp_path, "--recipe", "nemotron-mtp-boost", "--mtp-layers", "3"))
    assert "--mtp-num-layers 3 --mtp-train-only" in words
    assert "unroll" not in words


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--recipe", "eagle"], "--recipe is 'eagle'; choose one of angelspec, "),
        (
            ["--recipe", "eagle3", "--mtp-layers", "2"],
            "--recipe eagle3 is for --drafter eagle3, and was given with MTP",
        ),
        (["--recipe", "glm-5.2", "--drafter", "eagle3"], "--recipe glm-5.2 is for MTP layers, and was given with --dr"),
        (["--recipe", "deepseek-v3"], "--recipe is deepseek-v3, which trains the trunk with its layers, and attach do"),
    ],
)
def test_a_recipe_is_rejected_for_an_unsuitable_run(flags: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        attached(tmp_path, *flags)


def test_the_verb_prints_all_recipes_and_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main([], "recipes") == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in recipe.names())
    assert verb.main(["dspark"], "recipes") == 0
    printed = capsys.readouterr().out
    assert "source: arXiv:2607.05147\n" in printed
    assert "--mtp-loss-mix ce=0.1,tv=0.9" in printed
    assert verb.main(["nothing"], "recipes") == 2
    assert "--recipe is 'nothing'; choose one of" in capsys.readouterr().err
