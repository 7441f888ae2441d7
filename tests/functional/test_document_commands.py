"""Every block of commands in README.md and docs/ runs as it is printed, in a folder that has what it speaks of.

Shell blocks go to bash, Python ones to Python, in the order in which they stand. What is not run (`PARSED` of
document_command.py says why) is looked up and parsed; `pytest -s` shows both.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import launch
import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

import fork_server
from document_command import PARSED, PROGRAMS
from documents import DOCUMENTS, SHELLS, blocks

COMMAND, SCENE = (Path(__file__).parent / f"document_{name}.py" for name in ("command", "scene"))
LINKED = "pretrain_gpt.py generate_gpt.py tools scripts tests examples benchmarks LICENSE".split()
RUN = (*SHELLS, "python")
TOOLS = "cat cp ls".split()
"""Programs of the system that a document may call."""

QUICKSTART = """
python tools/data/preprocess.py --input my_texts --tokenizer tokenizer --output-prefix runs/quickstart/data/corpus
python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 2 \\
    --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu \\
    --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 4 \\
    --lr 1e-3 --mtp-num-layers 2 \\
    --data-path runs/quickstart/data/corpus --split 90,10,0 --tokenizer-type HuggingFaceTokenizer \\
    --tokenizer-model tokenizer --log-interval 1 --eval-interval 2 --eval-iters 1 \\
    --save runs/quickstart/checkpoint --save-interval 2 --mtp-metrics-dir runs/quickstart
cp -r tokenizer runs/quickstart/data/corpus-tokenizer
python tools/checkpoint/convert.py mcore-to-hf runs/quickstart/checkpoint runs/quickstart/exported
for run in mine one two; do cp -r runs/quickstart runs/$run; done
"""
"""A run like the quickstart's, of two steps, under all names that documents give to a run."""

FLAGS = (
    "--seq-length 64 --micro-batch-size 2 --global-batch-size 2 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
)
FLAGS += "--vocab-size 383 --train-iters 2 --save-interval 2 --eval-interval 2 --eval-iters 1 "
FLAGS += "--moe-token-dispatcher-type allgather"
"""What documents call the flags of a launch line."""


@dataclass(frozen=True)
class Shell:
    """bash, with programs that run in forks."""

    programs: Path

    def __call__(self, block: str, folder: Path) -> str:
        """What the block printed; AssertionError where a command of it fails."""
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", block],
            cwd=folder,
            env={**os.environ, "PATH": str(self.programs), "FLAGS": FLAGS, "OMP_NUM_THREADS": "1"},
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
    return Shell(programs)


@pytest.fixture(scope="module")
def scene(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's doors, with models, texts and runs beside them."""
    folder = tmp_path_factory.mktemp("scene")
    for name in LINKED:
        (folder / name).symlink_to(launch.ROOT / name)
    (folder / "docs").mkdir()  # to be read as text: ten pages' beginnings are enough to be split
    for page in sorted((launch.ROOT / "docs").glob("*.md"))[:10]:
        (folder / "docs" / page.name).write_text(page.read_text()[:2000])
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(shell.programs)
    shell(f"python {SCENE} .\n{QUICKSTART}", folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "README.md" else [pytest.mark.matrix])
        for name, path in DOCUMENTS.items()
        if blocks(path.read_text(), *RUN)
    ],
)
def test_the_commands_of_a_document_run(name: str, shell: Shell, scene: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(scene, here, symlinks=True)
    for number, (language, block) in enumerate(blocks(DOCUMENTS[name].read_text(), *RUN)):
        if language == "python":
            (here / f"block{number}.py").write_text(block)
            print(block)
            python = "python" if "megatron_mtp" in block else sys.executable  # others find no stand-ins for CUDA
            block = f"{python} block{number}.py"
        print(block, shell(block, here), sep="\n")


BAD = {
    "megatron-mtp generate --load runs/mine/checkpoint --prompt x --no-such-flag": "arguments: --no-such-flag",
    "megatron-mtp trian": "invalid choice: 'trian'",
    "torchrun --nproc-per-node 8 pretrain_gpt.py --mtp-depths 2": "arguments: --mtp-depths 2",
    "torchrun --nproc-per-node 8 pretrain.py": "pretrain.py is not there",
    "bash scripts/attach_mtp.sh.old models/Qwen3-0.6B my_texts": "No such file",
    "python -m pytest tests/functional/test_no_such.py": "not found",
    "python benchmarks/no_such.py": "benchmarks/no_such.py",
    "vllm serve exported --speculative-method mtp": "--speculative-method",
    "bash scripts/test_smollm2.sh": "not in PARSED",
    "curl localhost": "curl: command not found",
}
"""What a document may not show, to what is said of it."""


@pytest.mark.parametrize("command", BAD)
def test_what_a_document_may_not_show_is_seen(command: str, shell: Shell, scene: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(BAD[command])):
        shell(f"{command} | cat\nls", scene)


def test_no_exemption_is_left_over() -> None:
    shown = "\n".join(block for path in DOCUMENTS.values() for _, block in blocks(path.read_text(), *SHELLS))
    assert [beginning for beginning in PARSED if beginning not in shown] == []
