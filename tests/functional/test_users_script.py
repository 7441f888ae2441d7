"""A user's own `pretrain_gpt.py` takes our depths by two changed lines, and trains what ours trains.

Or it keeps Megatron's model, to which the patch of integrations/ attaches a layer.
"""

import difflib
import subprocess
from pathlib import Path

import launch
import pytest

from megatron_mtp.checkpoint.convert.export_hf import form_of, mcore_to_hf
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.mcore.reader import DistReader

SCRIPT = (Path(__file__).parent / "users_pretrain_gpt.py").read_text(encoding="utf-8")
LAST_IMPORT = "from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage\n"
IMPORT = "from megatron_mtp.training.megatron_lm import gpt_config_from_args, parse_and_validate_args, pretrain\n"
STEP = "        forward_step,\n"
RUN = "--train-iters 3 --log-interval 1 --eval-interval 2 --eval-iters 1".split()


def with_our_depths() -> str:
    """The user's script with the two lines of docs/training.md."""
    return SCRIPT.replace(LAST_IMPORT, LAST_IMPORT + IMPORT).replace(STEP, "")


def test_two_lines_are_changed_and_the_page_shows_them() -> None:
    changed = difflib.ndiff(SCRIPT.splitlines(), with_our_depths().splitlines())
    lines = [line for line in changed if line[0] in "+-"]
    assert lines == [f"+ {IMPORT.strip()}", f"- {STEP.rstrip()}"]
    page = (launch.ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert f"+{IMPORT}" in page
    assert f"-{STEP}" in page


@pytest.mark.parametrize(
    ("processes", "flags"),
    [pytest.param(1, "", marks=pytest.mark.matrix), (2, "--pipeline-model-parallel-size 2")],
)
def test_the_script_learns_what_ours_learns(processes: int, flags: str, tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(with_our_depths(), encoding="utf-8")
    given = [*launch.TINY_RUN, *RUN, *flags.split(), "--mtp-metrics-dir"]
    started = {}
    for name, file, more in (("ours", "pretrain_gpt.py", []), ("theirs", script, ["--users-greeting", "us"])):
        arguments = [*given, str(tmp_path / name), *more]
        command = launch.python(file, *arguments) if processes == 1 else launch.torchrun(processes, file, *arguments)
        started[name] = launch.start(command, tmp_path / f"{name}.log")
    printed = {name: launch.finish(process, tmp_path / f"{name}.log") for name, process in started.items()}
    assert "the user's script greets us" in printed["theirs"]
    assert printed["theirs"].count("expected accepted length") == printed["ours"].count("expected accepted length") > 0
    losses = launch.learned(tmp_path / "ours")
    assert list(losses) == [1, 2, 3]
    assert losses[1].keys() == {"lm loss", "mtp_1 loss", "mtp_2 loss", "learning rate", "grad norm"}
    assert launch.learned(tmp_path / "theirs") == losses


ON_CPU = (
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion"
).split()
PREPARED = "from megatron_mtp.runtime import prepare\n\nprepare()\n"
"""What this machine needs in the place of a GPU."""


@pytest.mark.matrix
def test_the_patch_attaches_a_layer_to_megatrons_model(tmp_path: Path) -> None:
    script, saved = tmp_path / "pretrain_gpt.py", tmp_path / "saved"
    script.write_text(SCRIPT, encoding="utf-8")
    patch = launch.ROOT / "integrations" / "megatron_lm.patch"
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    script.write_text(PREPARED + script.read_text(encoding="utf-8"), encoding="utf-8")
    flags = [*launch.PLAIN_RUN, *RUN, *ON_CPU, "--save", str(saved), "--save-interval", "3"]
    printed = launch.run(launch.torchrun(2, script, *flags), tmp_path / "log")
    assert "iteration        3/       3" in printed
    keys = DistReader(saved).keys
    assert any(key.startswith("mtp.layers.0.transformer_layer.self_attention") for key in keys)
    mcore_to_hf(saved, tmp_path / "hf", Options(quiet=True), form_of(saved))
    assert (tmp_path / "hf" / "config.json").is_file()
