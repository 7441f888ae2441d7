"""A whole command: --mtp-train-only --sft on conversations with masked prompts, from a converted model."""

import json
import re
import sys
from pathlib import Path

import launch
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.checkpoint import FileSystemReader
from transformers import PreTrainedTokenizerFast

from megatron_mtp.runtime import prepare

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from hf_models import make

from megatron_mtp.checkpoint.convert.import_hf import Options, hf_to_mcore
from megatron_mtp.checkpoint.mcore.reader import DistReader

prepare()

SPECIAL = ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>", "<unk>", "<eos>"]
WORDS = ["System", "User", "Assistant", *(chr(letter) for letter in range(ord("a"), ord("z") + 1))]
RUN = (
    "--use-checkpoint-args --micro-batch-size 2 --global-batch-size 2 --seq-length 32 --train-iters 3 --lr 1e-3 "
    "--log-interval 1 --eval-interval 3 --eval-iters 1 --split 80,20,0 --save-interval 3 --finetune "
    "--moe-token-dispatcher-type allgather --sft --mtp-train-only --mtp-loss mix --mtp-loss-mix 0.5,0.3,0.2 "
    "--tokenizer-type SFTTokenizer --no-create-attention-mask-in-dataloader"
)


def tokenizer(folder: Path) -> Path:
    """With the special tokens of Megatron's prompt format nemotron-h-aligned."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[:4]})
    fast.save_pretrained(folder)
    return folder


def chats(file: Path) -> Path:
    """Ten equal lines of two conversations each, so that every step sees the same; the answers repeat the questions."""
    messages = [
        {"role": role, "content": content}
        for asked in ("a b c d e", "f g h")
        for role, content in (("system", "z"), ("user", asked), ("assistant", asked))
    ]
    file.write_text(10 * (json.dumps({"messages": messages}) + "\n"))
    return file


def test_depths_are_trained_on_answers_beside_a_trunk_that_stays(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "glm4_moe", 2)
    hf_to_mcore(source, tmp_path / "start", Options(quiet=True))
    folders = {
        "--load": tmp_path / "start",
        "--save": tmp_path / "trained",
        "--data-path": chats(tmp_path / "chats.jsonl"),
        "--tokenizer-model": tokenizer(tmp_path / "tokenizer"),
    }
    flags = [word for flag, folder in folders.items() for word in (flag, str(folder))]
    log = launch.run(launch.python("pretrain_gpt.py", *RUN.split(), *flags), tmp_path / "log")
    for depth in (1, 2):
        losses = [float(loss) for loss in re.findall(rf"mtp_{depth} loss (\S+) \|", log)][:3]
        assert losses[0] > losses[1] > losses[2] > 0
    assert "expected accepted length" in log
    start, trained = DistReader(tmp_path / "start"), DistReader(tmp_path / "trained")
    both = [(key, start.read(key), trained.read(key)) for key in trained.keys if start.holds(key)]
    changed = {key for key, before, after in both if not torch.equal(before, after[: len(before)])}  # less padding
    assert {key for key in changed if not key.startswith("mtp.")} == set()
    assert {f"mtp.layers.{depth}.eh_proj.weight" for depth in (0, 1)} <= changed
    stored = FileSystemReader(tmp_path / "trained" / "iter_0000003").read_metadata().state_dict_metadata
    optimized = [key for key in stored if key.startswith("optimizer.state.")]
    assert optimized
    assert [key for key in optimized if ".mtp." not in key] == []
