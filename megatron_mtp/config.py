"""Settings of the project: frozen dataclasses whose fields become the `--mtp-*` flags.

Megatron's own flags (`--mtp-num-layers`, `--mtp-loss-scaling-factor`, `--mtp-use-repeated-layer`) keep their meaning
and live in Megatron's TransformerConfig; here is only what Megatron lacks.
"""

from dataclasses import dataclass, field

ARCHITECTURES = ("sequential", "parallel")
INITS = ("random", "last-layer")


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

    def __post_init__(self) -> None:
        _one_of("--mtp-architecture", self.mtp_architecture, ARCHITECTURES)
        if self.mtp_init is not None:
            _one_of("--mtp-init", self.mtp_init, INITS)
        if self.mtp_acceptance_interval < 0:
            raise ValueError(
                f"--mtp-acceptance-interval is {self.mtp_acceptance_interval}; give 0 (never) or a number of steps."
            )


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag} is '{value}'; choose one of {', '.join(allowed)}.")
