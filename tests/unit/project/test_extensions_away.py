"""The core without its extensions: in a copy of the checkout without their folders, tests pass and verbs work.

The installed package still has the extensions' entry points.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import ROOT

SMOKE = """
    test_registry test_losses_table test_run_files test_speculative_config test_command
    test_drafting::test_drafting_never_changes_the_tokens_of_any_kind_of_model
    test_engine::test_a_text_ends_at_its_stops_and_cuts
""".split()
WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if not getattr(each, "__module__", "").startswith("__editable__")]
"""
"""Disables the editable installation, where files missing from the copy would be found."""

LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "runs", "extensions")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("core") / "checkout", ignore=LEFT_OUT))
    (made / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    return made


def run(copy: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(copy)
    return subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)


VERBS = "import megatron_mtp; from megatron_mtp.cli.verbs import VERBS; print(megatron_mtp.__file__, *VERBS)"


@pytest.mark.matrix
def test_every_verb_of_the_core_answers(copy: Path) -> None:
    file, *verbs = run(copy, "-c", VERBS).stdout.split()
    assert Path(file).is_relative_to(copy)
    assert {"train", "generate", "audit"} <= set(verbs)
    assert not {"plan", "predict", "prove", "report"} & set(verbs)
    for verb in verbs:
        done = run(copy, "-m", "megatron_mtp", verb, "--help")
        assert (done.returncode, done.stderr) == (0, ""), verb
        assert done.stdout.startswith("usage:"), verb
    done = run(copy, "-m", "megatron_mtp", "report", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("megatron-mtp: error: argument VERB: invalid choice: 'report'")
    done = run(copy, "-m", "megatron_mtp", "train", "--dry-run")
    assert done.returncode == 2
    assert "--dry-run needs the verb 'plan'" in done.stderr


@pytest.mark.matrix
def test_fast_tests_of_the_core_pass(copy: Path) -> None:
    names = (name.partition("::") for name in SMOKE)
    unit = ROOT / "tests" / "unit"
    files = [f"{next(unit.rglob(f'{file}.py')).relative_to(ROOT)}{colons}{case}" for file, colons, case in names]
    done = run(copy, "-m", "pytest", "-q", "-n", "0", *files)
    assert done.returncode == 0, done.stdout[-3000:]
