"""What a verb does with a checkpoint that contains malicious code, is damaged, or is missing.

`loading_cases.py` has the cases; all run in one process, which takes longer to start than any of them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import fork_server
import pytest

WORKER = Path(__file__).parents[2] / "support" / "loading_cases.py"
Told = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Told:
    flags = ["--all"] if pytestconfig.getoption("--all") else []
    words = [sys.executable, str(WORKER), str(tmp_path_factory.mktemp("cases")), *flags]
    done = fork_server.run(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def refused(case: dict[str, Any]) -> bool:
    """Return whether it failed with one sentence, possibly after Megatron's own lines."""
    said = case["error"].splitlines()
    sentences = [line for line in said if " error: " in line]
    return case["status"] == 2 and len(sentences) == 1 and said[-1] == sentences[0] and sentences[0].endswith(".")


def test_planted_code_is_never_run(told: Told, pytestconfig: pytest.Config) -> None:
    cases = {f"{fault}, {verb}": case for fault, verbs in told.items() for verb, case in verbs.items()}
    assert len([name for name in cases if "pickle" in name]) > (90 if pytestconfig.getoption("--all") else 25)
    assert [name for name, case in cases.items() if case["ran"]] == []


DESCRIBED = ("pickle: arguments in .distcp", "pickle: common.pt", "pickle: .distcp")
"""Checkpoints whose list of tensors is intact: `inspect` describes them, and exits with status 1."""


def test_every_damage_gives_a_clear_error_with_status_2(told: Told) -> None:
    by_verb = {
        f"{fault}, {verb}": case
        for fault, verbs in told.items()
        for verb, case in verbs.items()
        if not fault.startswith(("whole", "without", "saved", "nothing", "of a distributed")) and verb != "own_loop"
        if verb != "inspect" or fault not in DESCRIBED
    }
    assert {name: case for name, case in by_verb.items() if not refused(case)} == {}


def test_inspect_describes_the_rest_of_a_damaged_checkpoint(told: Told) -> None:
    cases = [told[fault]["inspect"] for fault in DESCRIBED if "inspect" in told.get(fault, ())]
    assert len(cases) > 1
    assert [case for case in cases if case["status"] != 1 or case["ran"]] == []


@pytest.mark.parametrize(
    ("fault", "verb", "says"),
    [
        ("pickle: .metadata", "train", "--load: "),
        ("pickle: .metadata", "train --pretrained-checkpoint", "--pretrained-checkpoint: "),
        ("pickle: .metadata", "generate", ".metadata is not a catalogue of a checkpoint: it names pathlib.Path.touch"),
        (
            "pickle: objects in .distcp",
            "train",
            "' holds getattr, which no checkpoint of Megatron's holds",
        ),
        (".distcp cut", "train", "bytes, but the checkpoint put "),
        (".distcp missing", "generate", "__0_0.distcp is missing; give another checkpoint"),
        (".distcp flipped", "train", "__0_0.distcp is damaged: "),
        (".distcp flipped", "inspect --check", "__0_0.distcp is damaged: "),
        (".metadata flipped", "train", ".metadata is"),
        ("metadata.json missing", "train", "metadata.json is missing, which is written last"),
        ("tracker junk", "train", "latest_checkpointed_iteration.txt names 'junk', which is not an iteration"),
        ("tracker to nowhere", "train", "names '7', but "),
        ("tracker to nowhere", "generate", "name an iteration that is there (2)"),
        ("a dangling link", "train", "is a link to /nowhere/at/all, which does not exist"),
        ("a file", "generate", "checkpoint is a file; give a folder"),
        ("older format junk", "train", "model_optim_rng.pt cannot be loaded: "),
        ("nothing there", "--save is another", "--load: "),
        ("nothing there", "--mtp-init", "--mtp-init random was given with --load "),
        ("nothing there", "--skip-train", "checkpoint does not exist; give a folder"),
        ("whole", "--ckpt-step to nowhere", "--ckpt-step is 9, but "),
        (
            "whole",
            "distributed optimizer",
            "not supported; give the flags that it was trained with, or --no-load-optim if",
        ),
        ("whole", "other positions", "was trained with rotary_base 10000, and this run has 500000; give the flags"),
        ("whole", "another rate by default", "or --override-opt-param-scheduler to take that of the flags"),
        ("whole", "longer schedule", "or --override-opt-param-scheduler to take that of the flags"),
        ("whole", "another model", "Global shape mismatch for loaded "),
        (
            "of a distributed optimizer",
            "as it is",
            "give the flags that it was trained with, or --no-load-optim if only its optimizer differs; the",
        ),
    ],
)
def test_the_error_names_the_fault(fault: str, verb: str, says: str, told: Told) -> None:
    assert refused(told[fault][verb]), told[fault][verb]
    assert says in told[fault][verb]["error"].splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "verb"),
    [
        ("nothing there", "--save is --load"),
        ("whole", "as it is"),
        ("whole", "inspect --check"),
        ("whole", "another rate"),
        ("whole", "--no-load-optim"),
        ("whole", "a new run with other positions"),
        ("of a distributed optimizer", "--no-load-optim"),
        ("without checksums", "as it is"),
        ("saved again by another program", "as it is"),
    ],
)
def test_loadable_checkpoints_are_loaded(fault: str, verb: str, told: Told) -> None:
    assert told[fault][verb]["status"] == 0, told[fault][verb]["error"]
