"""Settings of the project: frozen dataclasses whose fields become the `--mtp-*` flags.

Megatron's own flags (`--mtp-num-layers`, `--mtp-loss-scaling-factor`, `--mtp-use-repeated-layer`) keep their meaning
and live in Megatron's TransformerConfig; here is only what Megatron lacks.
"""

import math
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field

ARCHITECTURES = ("sequential", "parallel")
INITS = ("random", "last-layer")
LOSS_NAMES = ["ce", "kd", "tv", "mix"]
SCHEDULE_NAMES = ("constant", "step", "cosine")
TEMPERATURES = (0.01, 100.0)
"""The coldest and the hottest: beyond them float32 has no tempered distributions that differ from one word and from all
words alike."""


def _flag(default: object, help_text: str, **argparse_kwargs: object) -> object:
    """A field with what `argparse.add_argument` needs to know about it."""
    return field(default=default, metadata={"help": help_text, **argparse_kwargs})


@dataclass(frozen=True)
class MTPConfig:
    """What `pretrain_gpt.py` adds to Megatron's flags, one field a flag."""

    mtp_architecture: str = _flag(
        "sequential",
        "How the depths hang together: 'sequential' chains D modules, each of which sees the next token's embedding "
        "(DeepSeek-V3, arXiv:2412.19437, section 2.2); 'parallel' puts D independent heads on the trunk's hidden "
        "state (Gloeckle et al., arXiv:2404.19737). Default: sequential.",
        metavar="{" + ",".join(ARCHITECTURES) + "}",
    )  # type: ignore[assignment]
    mtp_init: str | None = _flag(
        None,
        "How to initialise depths that the loaded checkpoint does not have: 'random' as in a new model, 'last-layer' "
        "with the trunk's last layer (and eh_proj passing the hidden state on). Default: refuse to load such a "
        "checkpoint.",
        metavar="{" + ",".join(INITS) + "}",
    )  # type: ignore[assignment]
    mtp_acceptance_interval: int = _flag(
        0,
        "Measure the acceptance of every depth on each N-th training step as well, not only in evaluations; 0 never "
        "does, since the measurement costs a pass over all logits. Default: 0.",
        type=int,
        metavar="N",
    )  # type: ignore[assignment]
    mtp_metrics_dir: str | None = _flag(
        None,
        "Folder for metrics.jsonl (losses and acceptance by depth, one JSON object a line) and metrics.png, the plot "
        "made of it at the end of the run. Default: neither is written.",
        metavar="DIR",
    )  # type: ignore[assignment]

    mtp_train_only: bool = _flag(
        False,
        "Train the depths alone: trunk, embedding and head stay as they were loaded, bit by bit, and cost no gradients "
        "and no optimizer state. Default: everything is trained.",
        action="store_true",
    )  # type: ignore[assignment]
    mtp_loss: str = _flag(
        "ce",
        "What the depths learn: 'ce' the labels; 'kd' the trunk's own distribution of the same token, by its KL "
        "divergence; 'tv' the same by total variation, which is the rate at which sampled drafts are rejected; 'mix' a "
        "weighted sum of the three (--mtp-loss-mix). Default: ce.",
        metavar="{" + ",".join(LOSS_NAMES) + "}",
    )  # type: ignore[assignment]
    mtp_loss_mix: str | None = _flag(
        None, "Weights of ce, kd and tv in --mtp-loss mix, such as 0.2,0.4,0.4. Default: none.", metavar="CE,KD,TV"
    )  # type: ignore[assignment]
    mtp_temperature: float = _flag(
        1.0, "Temperature of both distributions in kd and tv. Default: 1.", type=float, metavar="T"
    )  # type: ignore[assignment]
    mtp_label_smoothing: float = _flag(
        0.0, "Part of the depths' cross-entropy that all tokens share. Default: 0.", type=float, metavar="S"
    )  # type: ignore[assignment]
    mtp_z_loss: float = _flag(
        0.0, "Weight of the squared log-normaliser in the depths' cross-entropy. Default: 0.", type=float, metavar="Z"
    )  # type: ignore[assignment]
    mtp_loss_weights: str | None = _flag(
        None,
        "Weights of depth 1 .. D beside each other, such as 1,0.8,0.6; they are multiplied by lambda / D. Default: 1 "
        "each.",
        metavar="W1,W2,...",
    )  # type: ignore[assignment]
    mtp_loss_schedule: str = _flag(
        "constant",
        "How lambda goes from --mtp-loss-scaling-factor to --mtp-loss-final-factor: 'step' after "
        "--mtp-loss-schedule-steps steps, 'cosine' during them. Default: constant.",
        metavar="{" + ",".join(SCHEDULE_NAMES) + "}",
    )  # type: ignore[assignment]
    mtp_loss_final_factor: float = _flag(0.0, "lambda at the end of its schedule. Default: 0.", type=float, metavar="X")  # type: ignore[assignment]
    mtp_loss_schedule_steps: int = _flag(0, "Training steps of lambda's schedule. Default: 0.", type=int, metavar="N")  # type: ignore[assignment]
    mtp_token_fraction: float = _flag(
        1.0,
        "Part of the slots on which the depths' losses are computed, drawn anew in every step; the rest costs no head. "
        "Default: 1.",
        type=float,
        metavar="F",
    )  # type: ignore[assignment]
    mtp_draft_vocab_size: int | None = _flag(
        None,
        "Let the depths draft the N most frequent tokens of --data-path alone, so that their head costs N rows; the "
        "list is kept in the checkpoint, and a run that loads it needs no flag. Default: the checkpoint's list, or all "
        "tokens.",
        type=int,
        metavar="N",
    )  # type: ignore[assignment]
    mtp_draft_vocab_file: str | None = _flag(
        None,
        "The same with tokens of your own: a text file with one token id on every line. Default: none.",
        metavar="FILE",
    )  # type: ignore[assignment]
    mtp_linear_ce_main: bool = _flag(
        False,
        "Compute the trunk's loss in chunks of tokens as well, as the depths' always is, so that its logits need no "
        "memory either. Default: Megatron's own loss.",
        action="store_true",
    )  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _one_of("--mtp-architecture", self.mtp_architecture, ARCHITECTURES)
        _one_of("--mtp-loss", self.mtp_loss, LOSS_NAMES)
        _one_of("--mtp-loss-schedule", self.mtp_loss_schedule, SCHEDULE_NAMES)
        if self.mtp_init is not None:
            _one_of("--mtp-init", self.mtp_init, INITS)
        if self.mtp_acceptance_interval < 0:
            raise ValueError(
                f"--mtp-acceptance-interval is {self.mtp_acceptance_interval}; give 0 (never) or a number of steps."
            )
        self._check_loss()
        self._check_drafts()
        self._check_schedule()

    def mix_weights(self) -> tuple[float, float, float]:
        """Of ce, kd and tv in `--mtp-loss mix`."""
        ce, kd, tv = _numbers("--mtp-loss-mix", self.mtp_loss_mix, 3, "of ce, kd and tv")
        return ce, kd, tv

    def loss_weights(self, depths: int) -> list[float]:
        """Of depth 1 .. D."""
        if self.mtp_loss_weights is None:
            return [1.0] * depths
        return _numbers("--mtp-loss-weights", self.mtp_loss_weights, depths, "one for each of --mtp-num-layers")

    def _check_loss(self) -> None:
        if (self.mtp_loss == "mix") != (self.mtp_loss_mix is not None):
            raise ValueError(
                f"--mtp-loss is {self.mtp_loss} and --mtp-loss-mix {self.mtp_loss_mix}; 'mix' needs its weights, and "
                "no other loss takes them."
            )
        if self.mtp_loss_mix is not None:
            self.mix_weights()
        coldest, hottest = TEMPERATURES
        if not coldest <= self.mtp_temperature <= hottest:
            raise ValueError(
                f"--mtp-temperature is {self.mtp_temperature}; give a number from {coldest:g} to {hottest:g}."
            )
        if not 0 <= self.mtp_label_smoothing < 1:
            raise ValueError(f"--mtp-label-smoothing is {self.mtp_label_smoothing}; give 0 or more, and less than 1.")
        if not 0 <= self.mtp_z_loss < math.inf:
            raise ValueError(f"--mtp-z-loss is {self.mtp_z_loss}; give 0 or more.")
        if not 0 < self.mtp_token_fraction <= 1:
            raise ValueError(
                f"--mtp-token-fraction is {self.mtp_token_fraction}; give a number above 0, and at most 1."
            )

    def _check_drafts(self) -> None:
        if self.mtp_draft_vocab_size is not None and self.mtp_draft_vocab_size < 1:
            raise ValueError(
                f"--mtp-draft-vocab-size is {self.mtp_draft_vocab_size}; give 1 or more, or leave the flag out to "
                "draft all tokens."
            )
        if self.mtp_draft_vocab_size is not None and self.mtp_draft_vocab_file is not None:
            raise ValueError(
                f"--mtp-draft-vocab-size {self.mtp_draft_vocab_size} and --mtp-draft-vocab-file "
                f"{self.mtp_draft_vocab_file} were given, but a file has its own size; drop one of the two."
            )

    def _check_schedule(self) -> None:
        if (self.mtp_loss_schedule == "constant") != (self.mtp_loss_schedule_steps == 0):
            raise ValueError(
                f"--mtp-loss-schedule is {self.mtp_loss_schedule} and --mtp-loss-schedule-steps "
                f"{self.mtp_loss_schedule_steps}; 'step' and 'cosine' need a number of steps, 'constant' takes none."
            )
        if self.mtp_loss_schedule_steps < 0:
            raise ValueError(f"--mtp-loss-schedule-steps is {self.mtp_loss_schedule_steps}; give 1 or more.")
        if not 0 <= self.mtp_loss_final_factor < math.inf:
            raise ValueError(f"--mtp-loss-final-factor is {self.mtp_loss_final_factor}; give 0 or more.")


def _one_of(flag: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag} is '{value}'; choose one of {', '.join(allowed)}.")


def _numbers(flag: str, given: str | None, count: int, which: str) -> list[float]:
    """Numbers with commas between them, none below 0, not all 0."""
    try:
        numbers = [float(part) for part in (given or "").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 <= number < math.inf for number in numbers) or not any(numbers):
        raise ValueError(f"{flag} is '{given}'; give {count} numbers of 0 or more ({which}), with commas, not all 0.")
    return numbers


def add_yarn_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Flags for YaRN in latent attention that Megatron's configuration has and its parser lacks; defaults are its."""
    group = parser.add_argument_group("YaRN of multi-latent attention (megatron-mtp)")
    for flag, kind, default, text in (
        ("original-max-position-embeddings", int, 4096, "positions that the model had before the scaling"),
        ("beta-fast", float, 32.0, "rotations from which on a channel keeps its angles"),
        ("beta-slow", float, 1.0, "rotations up to which a channel's angles are divided by the scaling factor"),
    ):
        group.add_argument(f"--{flag}", type=kind, default=default, help=f"{text} (default: {default})")
    return parser
