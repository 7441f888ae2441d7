"""Arguments of all trainings and evaluations of `megatron-mtp attach`: data, model and training settings."""

import json
from pathlib import Path
from typing import NamedTuple

from megatron_mtp.cli.attach_settings import OF_CHATS, AttachSettings, names_of
from megatron_mtp.data.chat import is_chat
from megatron_mtp.spec.kinds import DRAFTERS

SPLIT = "98,2,0"
PASSES = 2
"""Default of --unroll: the best number measured in docs/explanation/evidence_losses.md."""


class TrainingChoice(NamedTuple):
    """A learning rate, as text, and a loss; None for a drafter's own loss."""

    rate: str
    loss: str | None


def training_of(settings: AttachSettings, chosen: TrainingChoice, steps: int) -> list[str]:
    """Return the flags of a training or evaluation; flags of the command line come later and override them."""
    passes = passes_of(settings)
    repeated = "" if passes is None else f"--mtp-use-repeated-layer --mtp-unroll {passes} "
    trained = f"--mtp-num-layers {settings.mtp_layers or 1} {repeated}--mtp-train-only --mtp-loss-scaling-factor 1"
    if settings.drafter:
        trained = f"--drafter {settings.drafter}"
    has_own = "--lr-warmup-fraction" in names_of(settings.more)
    warmup = "" if has_own else f"--lr-warmup-iters {steps // 20 + 1} "
    flags = (
        f"--use-checkpoint-args {trained} {f'--mtp-loss {chosen.loss} ' if chosen.loss else ''}"
        f"--mtp-token-fraction {settings.token_fraction} "
        f"--seq-length {settings.sequence} --micro-batch-size {settings.batch} --global-batch-size {settings.batch} "
        f"--train-iters {steps} --lr {chosen.rate} --min-lr 1e-5 --lr-decay-style cosine "
        f"{warmup}"
        "--clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 "
        f"--split {SPLIT} --eval-iters {settings.evaluated_batches} --no-create-attention-mask-in-dataloader "
        "--tokenizer-type HuggingFaceTokenizer"
    )
    paths = ["--data-path", trained_on(settings), "--tokenizer-model", str(settings.model)]
    more = [word for word in settings.more if word not in OF_CHATS]
    return [*flags.split(), *paths, *([] if settings.float32 else ["--bf16"]), *more]


def trunk_of(settings: AttachSettings) -> str:
    """Return the trunk's Megatron checkpoint."""
    return str(settings.load or f"{settings.run}/trunk")


def beginning(settings: AttachSettings) -> str:
    """Return the checkpoint that the training starts from."""
    return trunk_of(settings) if settings.drafter and not fits_drafter(settings) else f"{settings.run}/start"


def fits_drafter(settings: AttachSettings) -> bool:
    """Return whether a drafter is initialized by a fit to the corpus."""
    init = settings.drafter_init or ("random" if is_chat_file(settings.corpus) else "fitted")
    return settings.drafter is not None and DRAFTERS[settings.drafter].can_be_fitted and init == "fitted"


def trained_on(settings: AttachSettings) -> str:
    """Return the prefix of the corpus of trainings and evaluations."""
    return f"{settings.run}/data/{'corpus' if settings.self_generated is None else 'own'}"


def passes_of(settings: AttachSettings) -> int | None:
    """Return the number of passes of one MTP layer; None for layers with one pass each, and for a drafter."""
    return settings.unroll or (PASSES if settings.mtp_layers is None and settings.drafter is None else None)


def is_chat_file(corpus: str) -> bool:
    """Return whether it is a file of conversations."""
    if not corpus.endswith(".jsonl") or not Path(corpus).is_file():
        return False
    with open(corpus, encoding="utf-8", errors="replace") as file:
        line = next((line for line in file if line.strip()), "")
    try:
        return is_chat(json.loads(line))
    except (ValueError, TypeError):
        return False
