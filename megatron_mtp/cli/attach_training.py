"""What every training and evaluation of `megatron-mtp attach` is given: data, model, and settings of the training."""

import json
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from megatron_mtp.data.chat import is_chat
from megatron_mtp.spec.config import flag_of
from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.training.flags import CHAT_FLAGS

OF_CHATS = [flag_of(name) for name in CHAT_FLAGS]
"""Flags of `train` that say how chats are tokenized: they are the corpus's, and not the training's."""
SPLIT = "98,2,0"
PASSES = 2
"""Default of --unroll: the best number that docs/explanation/evidence_losses.md has measured."""


class TrainingChoice(NamedTuple):
    """A learning rate as it is written, and a loss; None for a drafter's own."""

    rate: str
    loss: str | None


def training_of(args: Namespace, settings: TrainingChoice, steps: int) -> list[str]:
    """The flags of a training or an evaluation; flags of the command line come later and override them."""
    passes = passes_of(args)
    repeated = "" if passes is None else f"--mtp-use-repeated-layer --mtp-unroll {passes} "
    trained = f"--mtp-num-layers {args.mtp_layers or 1} {repeated}--mtp-train-only --mtp-loss-scaling-factor 1"
    if args.drafter:
        trained = f"--drafter {args.drafter}"
    flags = (
        f"--use-checkpoint-args {trained} {f'--mtp-loss {settings.loss} ' if settings.loss else ''}"
        f"--mtp-token-fraction {args.token_fraction} "
        f"--seq-length {args.sequence} --micro-batch-size {args.batch} --global-batch-size {args.batch} "
        f"--train-iters {steps} --lr {settings.rate} --min-lr 1e-5 --lr-decay-style cosine "
        f"--lr-warmup-iters {steps // 20 + 1} "
        "--clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 "
        f"--split {SPLIT} --eval-iters {args.evaluated_batches} --no-create-attention-mask-in-dataloader "
        "--tokenizer-type HuggingFaceTokenizer"
    )
    paths = ["--data-path", trained_on(args), "--tokenizer-model", str(args.model)]
    more = [word for word in args.more if word not in OF_CHATS]
    return [*flags.split(), *paths, *([] if args.float32 else ["--bf16"]), *more]


def trunk_of(args: Namespace) -> str:
    """The trunk in Megatron's form."""
    return str(args.load or f"{args.run}/trunk")


def beginning(args: Namespace) -> str:
    """The checkpoint that the training begins from."""
    return trunk_of(args) if args.drafter and not fits_drafter(args) else f"{args.run}/start"


def fits_drafter(args: Namespace) -> bool:
    """True if a drafter begins as a fit to the corpus."""
    init = args.drafter_init or ("random" if is_chat_file(args.corpus) else "fitted")
    return args.drafter is not None and DRAFTERS[args.drafter].can_be_fitted and init == "fitted"


def trained_on(args: Namespace) -> str:
    """The prefix of the corpus of trainings and evaluations."""
    return f"{args.run}/data/{'corpus' if args.self_generated is None else 'own'}"


def passes_of(args: Namespace) -> int | None:
    """Passes of one MTP layer; None for layers that have one pass each, and for a drafter."""
    return args.unroll or (PASSES if args.mtp_layers is None and args.drafter is None else None)


def is_chat_file(corpus: str) -> bool:
    """True if it is a file of conversations."""
    if not corpus.endswith(".jsonl") or not Path(corpus).is_file():
        return False
    with open(corpus, encoding="utf-8", errors="replace") as file:
        line = next((line for line in file if line.strip()), "")
    try:
        return is_chat(json.loads(line))
    except (ValueError, TypeError):
        return False
