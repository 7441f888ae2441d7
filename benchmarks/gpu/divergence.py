"""How often drafted outputs diverge from plain decoding in bfloat16, where products of more rows round differently.

A small model is trained briefly on this repository's own source; in float32 no output may diverge.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import ROOT, Setting
from benchmarks.harness import Found, Goal, Table
from megatron_mtp.data.prompts import Beginnings
from megatron_mtp.decoding import generate
from megatron_mtp.decoding.load import load_runner

MODEL = (
    "--num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 8 "
    "--global-batch-size 8 --lr 4e-3 --min-lr 1e-4 --lr-decay-style cosine --mtp-num-layers 2 --split 100,0,0 "
    "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 128 --eval-interval 100000 --eval-iters 0 "
    "--no-create-attention-mask-in-dataloader"
).split()
PROMPT, ENTRIES = 16, 512


def divergence(setting: Setting) -> Found:
    """Count sequences that diverge, and the tokens before the first difference; by dtype and K."""
    steps, prompts, tokens = (2, 2, 8) if setting.quick else (400, 64, 128)
    saved, corpus = trained(setting, steps), setting.folder / "corpus"
    rows: list[tuple[Any, ...]] = []
    goals = []
    for dtype in (torch.float32, torch.bfloat16):
        runner = load_runner(saved, dtype=dtype)
        drawn = Beginnings(str(corpus), PROMPT, 1, "100,0,0", "training", anywhere=True)
        starts = [drawn.prompt(number) for number in range(prompts)]
        plain = generate(runner, starts, tokens).token_ids
        for count in (1, 2):
            drafted = generate(runner, starts, tokens, None, {"method": "mtp", "num_speculative_tokens": count})
            parted = [
                place for one, other in zip(plain, drafted.token_ids, strict=True) if (place := first_other(one, other))
            ]
            mean = sum(parted) / len(parted) if parted else None
            name = str(dtype).removeprefix("torch.")
            rows.append((name, count, drafted.stats.accepted_length, prompts, len(parted), mean))
            if dtype == torch.float32:
                goals.append(Goal(f"divergence: texts that part in float32, K = {count}", len(parted), 0))
            setting.keep(found_of(rows, goals, steps, tokens))
    return found_of(rows, goals, steps, tokens)


def found_of(rows: list[tuple[Any, ...]], goals: list[Goal], steps: int, tokens: int) -> Found:
    header = ("dtype", "K", "tokens a forward", "texts", "texts that part", "at token, mean")
    title = f"Drafted texts against plain ones, {tokens} tokens, after {steps} steps of training"
    return Found(
        {"rows": [dict(zip(header, row, strict=True)) for row in rows]}, [*goals], [Table(title, header, [*rows])]
    )


def first_other(one: list[int], other: list[int]) -> int:
    """Return the number of the first differing token, from 1; 0 if all are equal."""
    return next((place for place, pair in enumerate(zip(one, other, strict=False), start=1) if pair[0] != pair[1]), 0)


def trained(setting: Setting, steps: int) -> Path:
    """Return a float32 checkpoint of the small model."""
    corpus, saved = setting.folder / "corpus", setting.folder / "saved"
    made = f"--input {ROOT / 'megatron_mtp'} --include *.py --vocab-size {ENTRIES} --output-prefix {corpus}"
    setting.run("preprocess", [ROOT / "tools" / "data" / "preprocess.py", *made.split()])
    data = f"--data-path {corpus} --tokenizer-model {corpus}-tokenizer --train-iters {steps} --save {saved}"
    setting.run("train", [ROOT / "pretrain_gpt.py", *MODEL, *data.split(), "--save-interval", str(steps)])
    return saved
