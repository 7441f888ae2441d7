"""`megatron-mtp plan` from the command line: output, imports, speed, and whether training accepts its flags."""

import json
import re
import shlex
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import fork_server
import launch
import pytest
from lines import LARGE, words_of

from megatron_mtp.extensions.plan.command import main
from megatron_mtp.extensions.plan.hardware import CARDS
from megatron_mtp.extensions.plan.planning import NAIVE, plan

PROGRAM = "megatron-mtp plan"
SMALL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 128000 --bf16 --swiglu "
    "--untie-embeddings-and-output-weights --pipeline-model-parallel-size 4 --global-batch-size 64 --mtp-num-layers 1"
).split()
GPUS = ["--gpu", "H100", "--gpus", "8"]

LOADED = """
import sys
from megatron_mtp.extensions.plan.command import main
main(sys.argv[1:], "megatron-mtp plan")
print("LOADED", *sys.modules)
"""
ALLOWED = """
import sys
import megatron_mtp.spec.config, megatron_mtp.checkpoint.families
import megatron_mtp.cli.verbs, megatron_mtp.common.command, megatron_mtp.common.errors, megatron_mtp.common.files
print("LOADED", *sys.modules)
"""
"""Config, families, and modules shared by all verbs."""


def loaded(script: str, *words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=fork_server.ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("LOADED")[1].split())


def test_plan_imports_only_config_and_families_of_the_core() -> None:
    modules = loaded(LOADED, *GPUS, "--accepted", "glm", "--", *SMALL)
    core = {one for one in modules if one.startswith("megatron_mtp.") and ".extensions" not in one}
    assert core <= loaded(ALLOWED)
    assert not {"torch", "megatron", "megatron.core", "transformers", "plotly"} & modules


def test_the_core_does_not_import_extensions() -> None:
    script = "import sys, megatron_mtp.cli.main, megatron_mtp.cli.train; print('LOADED', *sys.modules)"
    assert not [name for name in loaded(script) if name.startswith("megatron_mtp.extensions.")]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*GPUS, *words], PROGRAM) == 0
    return capsys.readouterr().out


def test_the_text_ends_with_a_launch_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--", *SMALL)
    line = text.split("\n\n")[-1].splitlines()
    assert line[0].startswith("recommended: stage of their own, ")
    assert line[0].endswith("less time than the naive placement")
    assert shlex.split(line[1]) == [
        *SMALL[:-2],
        "--mtp-num-layers",
        "1",
        "--pipeline-model-parallel-layout",
        "Etttt|tttt|m|L",
    ]
    assert len(re.findall(r"^\d +naive ", text, re.MULTILINE)) == 5
    assert "memory of a rank, GiB" in text


def test_json_has_every_stage_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(printed(capsys, "--json", "--accepted", "0.8,0.6", "--batches", "1", "16", "--", *SMALL))
    best = made["recommended"]
    assert best["stages"] == ["Etttt", "tttt", "m", "L"]
    assert len(best["bytes by stage"]) == 4
    assert sum(best["seconds by part"].values()) == pytest.approx(best["seconds"])
    assert made["tokens of a step"] == 64 * 2048
    assert {option["depths"] for option in made["options"]} == {0, 1, 2, 3, 4}
    assert list(made["drafting"]["speed-up by batch"]) == ["1", "16"]
    assert made["drafting"]["acceptance"][:2] == [0.8, 0.6]


def test_gpu_here_plans_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --swiglu"
    here = ["--gpu", "here", "--gpus", "1", "--json", "--", *words.split(), "--transformer-impl", "local"]
    assert main(here, PROGRAM) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["gpu"] == "here"
    assert made["recommended"]["seconds"] > 0


def test_acceptance_is_read_from_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mtp_acceptance.json").write_text(json.dumps({"acceptance": [0.75, 0.5]}))
    text = printed(capsys, "--accepted", str(tmp_path), "--", *SMALL)
    assert re.search(r"^length +1\.75 +2\.25 ", text, re.MULTILINE)
    (tmp_path / "mtp_acceptance.json").write_text("{}")
    assert main([*GPUS, "--accepted", str(tmp_path), "--", *SMALL], PROGRAM) == 2


class Page(HTMLParser):
    """Collect the addresses that a page requests."""

    asked: tuple[str, ...] = ()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += tuple(value or "" for name, value in attrs if name in ("src", "href"))


def test_the_page_has_bars_for_every_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.html"
    printed(capsys, "--accepted", "glm", "--output", str(target), "--", *SMALL)
    text = target.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.asked == ()
    assert text.count('class="plotly-graph-div"') == 4
    for words in ("D = 4", "memory of a rank, GiB", "stage of their own", "activations", "batch 128", "Etttt|tttt|m|L"):
        assert words in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*GPUS], "there is no launch line"),
        (["--gpu", "A100", "--gpus", "8", "--", *SMALL], "--gpu is 'A100'; give H100, H200, B200, MI300X"),
        (["--gpu", "bf16=300,memory=64", "--gpus", "8", "--", *SMALL], "--gpu lacks bandwidth, link, network"),
        (["--gpu", "H100,speed=3", "--gpus", "8", "--", *SMALL], "--gpu has 'speed=3'"),
        (["--gpu", "H100,network=0", "--gpus", "8", "--", *SMALL], "give network a number above 0"),
        (["--gpu", "H100", "--gpus", "6", "--", *SMALL], "--gpus is 6; the line's layout"),
        (["--gpu", "H100", "--gpus", "0", "--", *SMALL], "--gpus is 0; give 1 or more"),
        ([*GPUS, "--depths", "-1", "--", *SMALL], "--depths is -1"),
        ([*GPUS, "--step-seconds", "1e-9", "--", *SMALL], "head and losses alone take"),
        ([*GPUS, "--accepted", "0.5,0.9", "--", *SMALL], "numbers above 0 and up to 1, each at most the one before"),
        ([*GPUS, "--accepted", "nobody", "--", *SMALL], "--accepted is 'nobody'"),
        ([*GPUS, "--batches", "0", "--", *SMALL], "--batches has 0"),
        ([*GPUS, "--", *SMALL, "--global-batch-size", "63"], "--global-batch-size is 63; give a multiple of 2"),
        ([*GPUS, "--gpuz", "3", "--", *SMALL], "unrecognized arguments: --gpuz; did you mean --gpu"),
        (["--gpu", "H100", "--", *SMALL], "the following arguments are required: --gpus"),
    ],
)
def test_bad_input_is_rejected_with_a_clear_error(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(words, PROGRAM)
    except SystemExit as end:  # argparse's
        status = end.code
    said = capsys.readouterr().err
    assert (says in said, len(said.strip().splitlines()), status) == (True, 1, 2), said


MARGINS = {
    "deepseek-v3-h100": 0.15,
    "deepseek-v3-uneven-stages": 0.05,
    "glm4.5": 0.08,
    "qwen3-next-80b-a3b-hybrid": 0.08,
}
"""Minimum fraction of a step that the recommended placement saves over the naive one."""


@pytest.mark.parametrize(("name", "gpus"), [(name, gpus) for name, (_, counts) in LARGE.items() for gpus in counts])
def test_large_jobs_are_planned_in_seconds(name: str, gpus: int) -> None:
    words = words_of(name, LARGE[name][0])
    began = time.process_time()
    made = plan(words, CARDS["H100"], gpus)
    assert time.process_time() - began < 5
    assert made.margin > MARGINS[name]
    assert made.recommended.name != NAIVE


DRY = {"deepseek-v3-h100": 1024, "glm4.5": 512, "qwen3-next-80b-a3b-hybrid": 256}


@pytest.mark.matrix
@pytest.mark.parametrize("name", DRY)
def test_training_takes_the_recommended_flags(name: str, tmp_path: Path) -> None:
    """And counts the same parameters as the plan, stage by stage."""
    made = plan([*words_of(name, LARGE[name][0]), "--transformer-impl", "local"], CARDS["H100"], DRY[name])
    text = ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    command = [sys.executable, "-m", "megatron_mtp", "train", "--dry-run", str(DRY[name]), *made.flags, *text]
    said = launch.run(command, tmp_path / "log")
    counted = re.search(r"^parameters: ([\d,]+)$", said, re.MULTILINE)
    assert counted is not None
    assert int(counted[1].replace(",", "")) == made.model.size
    assert len(re.findall(r"^a rank of stage \d+ holds", said, re.MULTILINE)) == made.recommended.placement.ranks
