"""What `megatron-mtp attach` was asked for, and the flags of other verbs among that."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_mtp.losses.table import LOSSES
from megatron_mtp.spec.config import flag_of
from megatron_mtp.training.flags import CHAT_FLAGS


@dataclass(frozen=True)
class AttachSettings:
    """Values of the flags, which their help describes (`attach.py`).

    Attributes:
        more: flags of `train` and their values, as they were written.
    """

    model: Path
    corpus: str
    run: Path
    load: Path | None
    unroll: int | None
    mtp_layers: int | None
    mtp_init: str | None
    donor: Path | None
    drafter: str | None
    drafter_init: str | None
    recipe: str | None
    steps: int
    sequence: int
    batch: int
    learning_rate: str | None
    loss: str | None
    token_fraction: str
    float32: bool
    evaluated_batches: str
    patience: str
    allow_worse: bool
    save_every: int | None
    family: str | None
    prompt: str | None
    self_generated: int | None
    texts_by: str | None
    temperature: str
    max_new_tokens: str
    prompt_tokens: str
    anywhere: bool
    launch: str | None
    only: str | None
    trial: int | None
    overwrite: bool
    dry_run: bool
    more: list[str]


SET_BY_ATTACH = {
    "--train-iters": "--steps",
    "--train-samples": "--steps and --batch",
    "--mtp-num-layers": "--mtp-layers",
    "--mtp-unroll": "--unroll",
    "--save": "RUN, the third argument,",
}
"""Flags of `train` on which other steps depend, and the flag of attach for each."""
OF_CHATS = [flag_of(name) for name in CHAT_FLAGS]
"""Flags of `train` that say how chats are tokenized: they are the corpus's, and not the training's."""
OF_FIT = ["--drafter-layers", "--mtp-draft-vocab-size", "--mtp-draft-vocab-file"]
"""Flags of `train` that describe a drafter, which `convert fit-drafter` has too."""


def offered_losses() -> list[str]:
    """All but mix, whose weights are a flag of train more."""
    return [name for name in LOSSES.names() if name != "mix"]


def words_of_launch(command: str) -> list[str]:
    """The words of --launch. Raises ValueError where it is not a command."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--launch is '{command}', which is not a command ({error}); correct it.") from error


def names_of(more: list[str]) -> list[str]:
    """Names of the flags among these words."""
    return [word.partition("=")[0].replace("_", "-") for word in more if word.startswith("--")]


def words_of(more: list[str], flags: list[str]) -> list[str]:
    """These flags among others, with their values."""
    named = [next((word for word in reversed(more[: at + 1]) if word.startswith("--")), "") for at in range(len(more))]
    return [word for word, flag in zip(more, named, strict=True) if flag in flags]
