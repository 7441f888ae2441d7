"""`generate_gpt.py` as a user runs it: on a checkpoint just trained, over one process and two, and with bad input."""

import json
import subprocess
from pathlib import Path
from typing import Any

import launch
import pytest

PROMPTS = ["--prompt-ids", "1,2,3", "--prompt-ids", "9,8", "--max-new-tokens", "24"]
WORKER = Path(__file__).parent / "generate_worker.py"
MTP = ["--speculative-config", '{"method": "mtp"}']


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two depths after six steps, of the last of which the folder knows."""
    folder = tmp_path_factory.mktemp("trained")
    steps = f"--train-iters 6 --eval-interval 6 --eval-iters 1 --save-interval 6 --save {folder / 'checkpoint'}"
    launch.run(launch.pretrain(*steps.split(), "--ckpt-format", "torch_dist"), folder / "log")
    return folder / "checkpoint"


def generate(*flags: str, processes: int = 1) -> list[str]:
    if processes == 1:
        return launch.python("generate_gpt.py", *flags)
    return launch.torchrun(processes, "generate_gpt.py", *flags)


def printed(command: list[str], log: Path) -> dict[str, Any]:
    """The JSON object, which must be all of standard output."""
    with open(log, "wb") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, timeout=launch.TIMEOUT, check=False)
    assert done.returncode == 0, log.read_text()[-4000:]
    return json.loads(done.stdout)


def test_drafting_emits_what_plain_decoding_does_and_says_what_it_cost(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--load", str(checkpoint), *PROMPTS, *MTP, "--batch-size", "2", "--compare", "--json"]
    one = printed(generate(*flags), tmp_path / "log")
    assert [len(ids) for ids in one["token_ids"]] == [24, 24]
    assert one["same_tokens"] is True
    assert one["text"] is None
    assert one["target_forwards"] + one["accepted"] == 48
    assert len(one["accepted_per_position"]) == 2
    assert one["accepted_length"] == pytest.approx(48 / one["target_forwards"], abs=1e-3)
    assert one["energy_joules_per_token"] is not None or one["energy_reason"]
    two = printed(generate(*flags, processes=2), tmp_path / "log2")
    assert two["token_ids"] == one["token_ids"]
    assert two["same_tokens"] is True


def test_a_table_for_readers(checkpoint: Path, tmp_path: Path) -> None:
    auto = '{"method": "mtp_eagle", "num_speculative_tokens": "auto"}'
    flags = ["--load", str(checkpoint), "--prompt-ids", "1,2,3", "--speculative-config", auto, "--temperature", "1"]
    log = launch.run(generate(*flags, "--max-new-tokens", "40"), tmp_path / "log")
    for row in ("accepted at position 1", "accepted length", "target forwards", "tokens per second", "energy"):
        assert row in log


BAD = {
    "method": (["--speculative-config", '{"method": "medusa"}'], "choose one of mtp, mtp_eagle"),
    "no depths": (
        ["--speculative-config", '{"method": "draft_model", "num_speculative_tokens": 2, "model": "/nowhere"}'],
        "speculative config: model is /nowhere",
    ),
    "depths": (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'], "or choose mtp_eagle"),
    "temperature": (["--temperature", "-1"], "--temperature is -1.0; give 0 (greedy) or more."),
    "file": (["--prompt-file", "/nowhere.txt"], "'/nowhere.txt' cannot be read"),
    "positions": (["--prompt-ids", ",".join(["1"] * 64)], "has 64 tokens, and the model has 64 positions"),
    "empty": (["--prompt-ids", ""], "a prompt is empty"),
    "text": (["--prompt", "hello"], "names no tokenizer"),
    "checkpoint": (["--load", "/nowhere"], "--load is /nowhere, where there is no latest_"),
}


def test_bad_input_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    alone = ("file", "empty", "text")  # whose prompt is what is wrong
    commands = [
        ["--load", str(checkpoint), *([] if name in alone else PROMPTS), *flags] for name, (flags, _) in BAD.items()
    ]
    log = launch.run(launch.python(WORKER, json.dumps(commands)), tmp_path / "log")
    for (_, said), outcome in zip(BAD.values(), json.loads(log.splitlines()[-1]), strict=True):
        assert outcome["status"] == 2
        assert outcome["said"].count("generate_gpt.py: error: ") == 1
        assert said in outcome["said"]


def test_bad_input_ends_the_command_with_status_2(tmp_path: Path) -> None:
    process = launch.start(generate("--load", "/nowhere", *PROMPTS), tmp_path / "log")
    assert process.wait(launch.TIMEOUT) == 2
    assert "Traceback" not in (tmp_path / "log").read_text()
