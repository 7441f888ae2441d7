"""Run every command block in README.md and docs/ unchanged, in a folder that has everything it refers to.

The same for the examples of every `--help`. Shell blocks run in bash, Python blocks in Python, in page order. What is
not run (`LISTED` of document_command.py has the reason) is looked up and parsed; `pytest -s` shows both.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import fork_server
import launch
import pytest
from document_command import LISTED, LISTED_CODE, PORTS, PROGRAMS, end_servers
from documents import DOCUMENTS, SHELLS, blocks
from tiers import tiered

from megatron_mtp.cli import verbs
from megatron_mtp.cli.main import EXAMPLES

COMMAND, SCENE = (Path(__file__).parents[1] / "support" / f"document_{name}.py" for name in ("command", "scene"))
LINKED = "megatron_mtp pretrain_gpt.py generate_gpt.py tools scripts tests examples benchmarks LICENSE".split()
RUN = (*SHELLS, "python")
TOOLS = "cat cp curl dirname id ls mkdir realpath".split()
"""System programs that a document may call."""

QUICKSTART = """
python tools/data/preprocess.py --input my_texts --tokenizer tokenizer --output-prefix runs/quickstart/data/corpus
python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 2 \\
    --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu \\
    --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 4 \\
    --lr 1e-3 --mtp-num-layers 1 \\
    --data-path runs/quickstart/data/corpus --split 90,10,0 --tokenizer-type HuggingFaceTokenizer \\
    --tokenizer-model tokenizer --log-interval 1 --eval-interval 2 --eval-iters 1 \\
    --save runs/quickstart/checkpoint --save-interval 2 --mtp-metrics-dir runs/quickstart
cp -r tokenizer runs/quickstart/data/corpus-tokenizer
python tools/checkpoint/convert.py mcore-to-hf runs/quickstart/checkpoint runs/quickstart/exported
for run in mine one two; do cp -r runs/quickstart runs/$run; done
"""
"""A run like the quickstart's, of two steps, under every name that documents use for a run."""

FIRST = ("README.md",)
"""Documents whose commands run in the first tier."""

MADE_BEFORE = """
mkdir shards
cp my_texts/1.txt held_out.txt
cp my_texts/1.txt a.txt
cp my_texts/2.txt held_out/a.txt
cp my_texts/3.txt prompts.txt
echo '{"prompt": "def "}' > prompts.jsonl
for number in 1 2 3; do echo '{"content": "one of a few words"}'; done > shards/a.jsonl
python tools/data/preprocess.py --input lines.jsonl --tokenizer tokenizer --output-prefix data/corpus
cp -r tokenizer data/corpus-tokenizer
python tools/checkpoint/convert.py hf-to-mcore models/Qwen3-0.6B checkpoints/trunk
cp -r checkpoints/trunk checkpoints/qwen
cp -r runs/mine/checkpoint checkpoints/mine
cp -r runs/mine/checkpoint checkpoints/trained
echo '{"acceptance": [0.5, 0.25], "overlap": [0.6, 0.5]}' > runs/mine/checkpoint/mtp_acceptance.json
cp -r runs/one runs/three
cp -r runs/quickstart/exported exported
cp -r exported models/mine
python tools/checkpoint/convert.py hf-to-mcore models/GLM-4.5-Air checkpoints/glm
python pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 2 \\
    --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu \\
    --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 4 --lr 1e-3 \\
    --data-path runs/quickstart/data/corpus --split 98,2,0 --tokenizer-type HuggingFaceTokenizer \\
    --tokenizer-model tokenizer --eval-interval 2 --eval-iters 1 --save trunk --save-interval 2
"""
"""What the help examples read in addition to the scene, and what pages read that continue another page."""
GO_ON = (
    *("docs/guides/self_generated_data.md", "docs/guides/draft_vocabulary.md", "docs/guides/block_drafters.md"),
    *("docs/reference/drafters.md", "docs/reference/families.md", "docs/guides/published_drafter.md"),
)
"""Pages that continue another page."""

MAKES = {
    "": ("data", "exported"),
    "attach": ("runs/three",),
    "convert": ("exported", "checkpoints/glm"),
    "preprocess": ("data",),
}
"""Folders that a verb's examples create themselves."""

TRAINING = (
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 2 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--train-iters 2 --save-interval 2 --eval-interval 2 --eval-iters 1 "
    "--moe-token-dispatcher-type allgather"
)
"""Names of shell variables in documents for flags of batches, schedule and data."""
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    f"--untie-embeddings-and-output-weights --vocab-size 383 {TRAINING}"
)
"""Names of shell variables in documents for flags of a launch line."""


@dataclass(frozen=True)
class Shell:
    """bash, with programs that run in forks."""

    programs: Path
    ports: tuple[int, int]

    def at_its_port(self, block: str) -> str:
        """Replace the server's port in the block by a free one."""
        return block.replace("127.0.0.1:8000", f"127.0.0.1:{self.ports[0]}")

    def __call__(self, block: str, folder: Path) -> str:
        """Return the block's output. Raise AssertionError if one of its commands fails."""
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", block],
            cwd=folder,
            env={
                **os.environ,
                "PATH": str(self.programs),
                "FLAGS": FLAGS,
                "TRAINING": TRAINING,
                "KEY": "secret",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_CACHE": str(folder / "hub"),
                PORTS: " ".join(map(str, self.ports)),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=launch.TIMEOUT,
        )
        assert done.returncode == 0, f"status {done.returncode} of\n{block}\nwhich printed\n{done.stdout[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    programs = tmp_path_factory.mktemp("shell") / "bin"
    programs.mkdir()
    (programs / "activate").touch()
    for name in PROGRAMS:
        fork_server.program(programs / name, str(COMMAND), name)
    for name in TOOLS:
        (programs / name).symlink_to(str(shutil.which(name)))
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return Shell(programs, (one.getsockname()[1], other.getsockname()[1]))


@pytest.fixture(scope="module")
def scene(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the repository's entry points, with models, texts and runs."""
    folder = tmp_path_factory.mktemp("scene")
    for name in LINKED:
        (folder / name).symlink_to(launch.ROOT / name)
    (folder / "docs").mkdir()  # the first part of ten pages is enough text to split
    for page in sorted((launch.ROOT / "docs").rglob("*.md"))[:10]:
        (folder / "docs" / page.name).write_text(page.read_text()[:2000])
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(shell.programs)
    shell(f"python {SCENE} .\n{QUICKSTART}", folder)
    return folder


def run_blocks(found: list[tuple[str, str]], shell: Shell, scene: Path, here: Path) -> None:
    """Run the blocks of a page or a help text in order, in a copy of the scene."""
    shutil.copytree(scene, here, symlinks=True)
    try:
        for number, (language, block) in enumerate(found):
            block = shell.at_its_port(block)
            print(block)
            if language != "python":
                print(shell(block, here))
                continue
            (here / f"block{number}.py").write_text(block)
            compile(block, f"block {number}", "exec")
            if reason := next((why for start, why in LISTED_CODE.items() if block.startswith(start)), None):
                print(f"[compiled alone, since it {reason}]")
                continue
            python = "python" if "megatron_mtp" in block else sys.executable  # others find no CUDA stand-ins
            print(shell(f"{python} block{number}.py", here))
    finally:
        end_servers(here)


WITH_BLOCKS = [name for name, path in DOCUMENTS.items() if blocks(path.read_text(), *RUN)]


@pytest.mark.parametrize("name", tiered(WITH_BLOCKS, FIRST))
def test_the_commands_of_a_document_run(
    name: str, shell: Shell, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    scene = request.getfixturevalue("scene_of_help" if name in GO_ON else "scene")
    run_blocks(blocks(DOCUMENTS[name].read_text(), *RUN), shell, scene, tmp_path / "here")


@pytest.fixture(scope="module")
def scene_of_help(shell: Shell, scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the scene, plus what help texts assume."""
    folder = tmp_path_factory.mktemp("help") / "scene"
    shutil.copytree(scene, folder, symlinks=True)
    shell(MADE_BEFORE, folder)
    return folder


HELP = {verb: getattr(verbs.module_of(verb), "EXAMPLES", "") for verb in verbs.VERBS} | {"": EXAMPLES}
"""Examples in each verb's `--help`; "" is the program's own."""


def examples(text: str) -> str:
    """Return the lines of a help text that are commands, with the comments above them."""
    lines = text.partition("examples:\n")[2].splitlines()
    return "\n".join(line for line in takewhile(lambda line: not line or line.startswith("  "), lines))


def test_every_verb_has_examples() -> None:
    assert [verb for verb, text in HELP.items() if not examples(text).strip()] == []


@pytest.mark.parametrize("verb", tiered(HELP, ()))
def test_the_examples_of_a_help_text_run(verb: str, shell: Shell, scene_of_help: Path, tmp_path: Path) -> None:
    scene = tmp_path / "scene"
    shutil.copytree(scene_of_help, scene, symlinks=True)
    for name in MAKES.get(verb, ()):
        shutil.rmtree(scene / name)
    run_blocks([("bash", examples(HELP[verb]))], shell, scene, tmp_path / "here")


BAD = {
    "megatron-mtp generate --load runs/mine/checkpoint --prompt x --no-such-flag": "arguments: --no-such-flag",
    "megatron-mtp trian": "invalid choice: 'trian'",
    "torchrun --nproc-per-node 8 pretrain_gpt.py --mtp-depths 2": "arguments: --mtp-depths 2",
    "torchrun --nproc-per-node 8 pretrain.py": "No such file or directory",
    "python -m pytest tests/functional/test_no_such.py": "not found",
    "python benchmarks/no_such.py": "benchmarks/no_such.py",
    "vllm serve exported --speculative-method mtp": "--speculative-method",
    "bash scripts/test_smollm2.sh": "not in LISTED",
    "wget localhost": "wget: command not found",
}
"""Patterns that a document must not show, and the expected error."""


@pytest.mark.parametrize("command", BAD)
def test_commands_forbidden_in_documents_are_detected(command: str, shell: Shell, scene: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(BAD[command])):
        shell(f"{command} | cat\nls", scene)


def test_no_exemption_is_left_over() -> None:
    shown = "\n".join(block for path in DOCUMENTS.values() for _, block in blocks(path.read_text(), *SHELLS))
    assert [beginning for beginning in LISTED if beginning not in shown] == []
    code = "\n".join(block for path in DOCUMENTS.values() for _, block in blocks(path.read_text(), "python"))
    assert [beginning for beginning in LISTED_CODE if beginning not in code] == []
