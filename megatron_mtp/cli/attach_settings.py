"""Settings of `megatron-mtp attach`, and flags of other commands among them."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_mtp.losses.table import LOSSES
from megatron_mtp.spec.config import flag_of
from megatron_mtp.training.flags import CHAT_FLAGS


@dataclass(frozen=True)
class AttachSettings:
    """Values of the flags; see their help (`attach.py`).

    Attributes:
        more: flags of `train` with their values, as written.
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
"""Flags of `train` for tokenizing chats, which attach applies to the corpus instead."""
OF_FIT = ["--drafter-layers", "--mtp-draft-vocab-size", "--mtp-draft-vocab-file"]
"""Flags of `train` that describe a drafter and that `convert fit-drafter` also has."""


def offered_losses() -> list[str]:
    """Return all losses but mix, which needs a further flag of train for its weights."""
    return [name for name in LOSSES.names() if name != "mix"]


def words_of_launch(command: str) -> list[str]:
    """Split --launch into words. Raise ValueError if it is not a command."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--launch is '{command}', which is not a command ({error}); correct it.") from error


def names_of(more: list[str]) -> list[str]:
    """Return the flag names among these words."""
    return [word.partition("=")[0].replace("_", "-") for word in more if word.startswith("--")]


def words_of(more: list[str], flags: list[str]) -> list[str]:
    """Return these flags with their values, from a list of words."""
    named = [next((word for word in reversed(more[: at + 1]) if word.startswith("--")), "") for at in range(len(more))]
    return [word for word, flag in zip(more, named, strict=True) if flag in flags]
