"""An independent client: llama.cpp drafts with exported drafters as our engine does.

Skipped without LLAMA_CPP, a checkout of llama.cpp whose `build/bin` has `llama-speculative-simple`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import launch
import numpy as np
import pytest
import sentencepiece
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_mtp.cli.convert import main as convert
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.megatron.runtime import prepare

prepare()

LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", "none"))
PROGRAM = LLAMA_CPP / "build/bin/llama-speculative-simple"
TOKENS, DRAFTS, NEW = 512, 4, 320
KINDS = {"eagle3": "", "dflash": "--drafter-num-layers 2 --drafter-mask-token 0 --drafter-blocks 32"}
KINDS["dspark"] = f"{KINDS['dflash']} --drafter-markov-rank 16"
PROMPTS = ("def test_", "The trunk is", "class Sequences", "for name in", "self.", "A draft of")

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason=f"LLAMA_CPP is {LLAMA_CPP}, without {PROGRAM.name}")


def train(folder: Path, *flags: str) -> None:
    own = f"--num-layers 8 --group-query-attention --num-query-groups 2 --data-path {folder}/data --split 100,0,0"
    more = f"--seq-length 128 --max-position-embeddings 1024 --vocab-size {TOKENS} --lr 2e-3 --global-batch-size 8"
    rest = "--untie-embeddings-and-output-weights --micro-batch-size 8 --eval-iters 0 --make-vocab-size-divisible-by 64"
    plain = [word for word in launch.PLAIN_RUN if word != "--mock-data"]
    last = "--attention-dropout 0 --hidden-dropout 0 --eval-interval 1000 --no-create-attention-mask-in-dataloader"
    words = (*plain, *own.split(), *more.split(), *rest.split(), *last.split(), *flags)
    launch.run(launch.Command("pretrain_gpt.py", words), folder / "log")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a trunk trained briefly on our own sources, and its export."""
    made = tmp_path_factory.mktemp("llama_cpp")
    texts = [path.read_text() for path in sorted((launch.ROOT / "megatron_mtp").rglob("*.py"))]
    (made / "corpus").write_text("\n".join(texts))
    settings: dict[str, Any] = {
        "vocab_size": TOKENS,
        "model_type": "bpe",
        "byte_fallback": True,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "pad_id": -1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(input=str(made / "corpus"), model_prefix=f"{made}/tokenizer", **settings)
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{made}/tokenizer.model")
    builder = IndexedDatasetBuilder(f"{made}/data.bin", dtype=np.int32)
    for text in texts:
        builder.add_item(torch.tensor([1, *pieces.encode(text), 2], dtype=torch.int32))
        builder.end_document()
    builder.finalize(f"{made}/data.idx")
    train(made, "--train-iters", "200", "--save", f"{made}/trunk", "--save-interval", "200")
    assert convert(["mcore-to-hf", f"{made}/trunk", f"{made}/exported"]) == 0
    (made / "exported/tokenizer.model").write_bytes((made / "tokenizer.model").read_bytes())
    to_gguf(made / "exported", made / "trunk.gguf")
    return made


def to_gguf(exported: Path, made: Path, *flags: str) -> None:
    words = (str(LLAMA_CPP / "convert_hf_to_gguf.py"), str(exported), "--outtype", "f32", "--outfile", str(made))
    path = os.environ | {"PYTHONPATH": str(LLAMA_CPP / "gguf-py")}
    done = subprocess.run([sys.executable, *words, *flags], env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def drafted_by_llama_cpp(folder: Path, kind: str, least: float, prompt: str) -> tuple[int, int, str]:
    """Return drafted and accepted tokens, and all output."""
    models = f"-m {folder}/trunk.gguf -md {folder}/{kind}.gguf --spec-type draft-{kind} --spec-draft-n-max {DRAFTS} "
    models += f"--spec-draft-p-min {least}"
    types = "-ctk f32 -ctv f32 -ctkd f32 -ctvd f32 -fa off -t 1 -td 1 -c 512 -b 512"
    words = [str(PROGRAM), *models.split(), *types.split(), "--temp", "0", "--ignore-eos", "-n", str(NEW), "-p", prompt]
    libraries = os.environ | {"LD_LIBRARY_PATH": str(PROGRAM.parent)}
    for _ in range(8):  # if it exits before its log is flushed, the last lines are lost
        done = subprocess.run(words, env=libraries, capture_output=True, text=True, timeout=300, check=False)
        printed = done.stdout + done.stderr
        found = re.search(r"n_drafted = (\d+).*n_accept  = (\d+)", printed, re.DOTALL)
        if found is not None:
            return int(found[1]), int(found[2]), printed
    raise AssertionError(printed[-2000:])


def add_drafter(folder: Path, kind: str) -> None:
    """Train and convert the drafter."""
    train(
        folder,
        *f"--train-iters 150 --load {folder}/trunk --save {folder}/{kind} --save-interval 150".split(),
        *f"--drafter {kind} --drafter-steps {DRAFTS} {KINDS[kind]}".split(),
    )
    assert convert(["drafter-to-hf", f"{folder}/{kind}", f"{folder}/{kind}_exported"]) == 0
    to_gguf(folder / f"{kind}_exported", folder / f"{kind}.gguf", "--target-model-dir", str(folder / "exported"))


@pytest.mark.parametrize(("kind", "least"), [*((kind, 0) for kind in KINDS), ("dspark", 0.6)])
def test_llama_cpp_accepts_what_our_engine_accepts(folder: Path, kind: str, least: float) -> None:
    """The outputs are equal, and acceptance is within a point; drafts stop below the confidence `least`."""
    if not (folder / f"{kind}.gguf").exists():
        add_drafter(folder, kind)
    runner = load_runner(folder / kind)
    speculative = {"method": kind, "num_speculative_tokens": DRAFTS, **({"min_confidence": least} if least else {})}
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")
    drafted, accepted = [0, 0], [0, 0]
    for prompt in PROMPTS:
        ids = [1, *pieces.encode(prompt)]
        begun = [*ids, *generate(runner, [ids], 1).token_ids[0]]
        longer = pieces.decode(begun)
        if [1, *pieces.encode(longer)] != begun:
            continue  # llama.cpp reads text, and would tokenize it differently
        ours = generate(runner, [ids], NEW + 1, speculative=speculative)
        theirs = drafted_by_llama_cpp(folder, kind, least, longer)
        text = "".join(pieces.decode(ours.token_ids[0]).split())
        assert text in "".join(theirs[2].split())
        for number, (mine, their) in enumerate(((ours.stats.drafted, theirs[0]), (ours.stats.accepted, theirs[1]))):
            (drafted, accepted)[number][0] += mine
            (drafted, accepted)[number][1] += their
    print(f"{kind}, {least}: {accepted[1]} of {drafted[1]} by llama.cpp, {accepted[0]} of {drafted[0]} by our engine")
    rates = [100 * hits / offers for hits, offers in zip(accepted, drafted, strict=True)]
    assert abs(rates[0] - rates[1]) < 1
    assert min(accepted) > 0
