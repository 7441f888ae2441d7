"""Settings of MTP layers and drafters: a frozen dataclass whose fields become the `--mtp-*` and `--drafter*` flags.

Megatron's own flags (`--mtp-num-layers`, `--mtp-loss-scaling-factor`, `--mtp-use-repeated-layer`) keep their meaning
and stay in Megatron's TransformerConfig; this module has only the settings that Megatron lacks.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from itertools import accumulate
from typing import Any

from megatron_mtp.spec.attention import LatentSizes, parsed_scaling
from megatron_mtp.spec.kinds import (
    DRAFTERS,
    FROM_0,
    FROM_1,
    STEPS,
    DrafterKind,
    Range,
    Setting,
    readers_of,
    settings_of_kinds,
)

ARCHITECTURES = ("sequential", "parallel")
INITS = ("random", "last-layer")
OF_KINDS = settings_of_kinds()
"""Settings that only some kinds of drafters read."""

SHARED_KEYS = ("mtp_repeated_layer_shares_kv", "mtp_repeated_layer_first_pass_kv")
"""Settings that let later passes of a repeated layer attend to pass 1's keys and values."""

COLDEST, HOTTEST = 0.01, 100.0
"""Temperature limits: below, a distribution collapses to one token in float32; above, it is uniform."""


def _step(first: float, final: float, progress: float) -> float:
    """Keep the first value until the end, as DeepSeek-V3 did (arXiv:2412.19437, section 4.2)."""
    return first if progress < 1 else final


def _cosine(first: float, final: float, progress: float) -> float:
    return final + (first - final) * (1 + math.cos(math.pi * progress)) / 2


SCHEDULES: dict[str, Callable[[float, float, float], float]] = {"step": _step, "cosine": _cosine}
"""Schedules of lambda from a first to a final value, as progress goes from 0 to 1. To add a schedule, add a row."""


def _flag[T](
    default: T, help_text: str, allowed: Range | None = None, choices: Sequence[str] = (), **argparse_kwargs: object
) -> T:
    """Create a field of `MTPConfig`.

    Args:
        allowed, choices: allowed values; None is always allowed.
        argparse_kwargs: further arguments of `argparse.add_argument`, and `alias`, a second name of the flag.
    """
    if choices:
        argparse_kwargs["metavar"] = "{" + ",".join(choices) + "}"
    metadata = {"help": help_text, "allowed": allowed, "choices": choices, **argparse_kwargs}
    made: T = field(default=default, metadata=metadata)
    return made


def _readers(setting: str) -> str:
    return " and ".join(f"'{name}'" for name in readers_of(setting))


def flag_of(name: str) -> str:
    """Return the flag of an argument."""
    return "--" + name.replace("_", "-")


def _declared(name: str, setting: Setting) -> Any:
    """Return the field of a setting that rows of kinds declare; its value is None where none is given."""
    text = setting.help.replace("{kinds}", _readers(name))
    if setting.value_type is bool:
        return _flag(None, text, action="store_true")
    described = {"type": setting.value_type, "metavar": setting.metavar, "nargs": "+" if setting.is_list else None}
    return _flag(None, text, setting.allowed, setting.choices, **described)


SettingsOfKinds: Any = make_dataclass(
    "SettingsOfKinds", [(name, Any, _declared(name, setting)) for name, setting in OF_KINDS.items()], frozen=True
)
"""A field for every setting of `OF_KINDS`."""


@dataclass(frozen=True)
class MTPConfig(SettingsOfKinds):
    """Settings that `pretrain_gpt.py` adds to Megatron's flags. Each field is a flag.

    The fields below are shared by all runs or all drafters. Settings that only some kinds of drafters read are declared
    in the rows of these kinds, and the base class makes fields of them: so whatever lists, checks, copies or compares
    fields includes them, also those of other packages.

    `megatron_mtp.losses.table` checks the name of the loss and `mtp_loss_mix`.

    Raises:
        ValueError: a setting has a value that is not allowed, or two settings contradict each other.
    """

    mtp_architecture: str = _flag(
        "sequential",
        "How the MTP layers are connected: 'sequential', a chain as in DeepSeek-V3, or 'parallel', each on the trunk's "
        "hidden state, as in Medusa. Default: sequential.",
        choices=ARCHITECTURES,
    )
    mtp_init: str | None = _flag(
        None,
        "How to initialize MTP layers that the checkpoint lacks: 'random', or 'last-layer' for a copy of the "
        "trunk's last layer. Default: refuse to load it.",
        choices=INITS,
    )
    mtp_acceptance_interval: int = _flag(
        0,
        "Also measure acceptance on every N-th training step, at the cost of a pass over all logits; 0: only "
        "in evaluations. Default: 0.",
        allowed=("0 (never) or a number of steps", FROM_0[1]),
        metavar="N",
    )
    mtp_context_lengths: Sequence[int] | None = _flag(
        None,
        "Also report acceptance by context length, in buckets with these upper bounds. Default: off.",
        type=int,
        nargs="+",
        metavar="N",
    )
    mtp_metrics_dir: str | None = _flag(
        None,
        "Folder for metrics.jsonl (losses and acceptance by depth, plotted by megatron-mtp report) and "
        "run.json. Default: neither is written.",
        metavar="DIR",
    )
    mtp_draft_prompts: Sequence[str] | None = _flag(
        None,
        "At evaluations, also draft for the first N prompts (default: 8) of this JSON-lines file and log the accepted "
        "length as tau_real. Default: off.",
        nargs="+",
        metavar=("FILE", "N"),
    )
    mtp_state_cache: str | None = _flag(
        None,
        "Folder in which the frozen trunk's states are kept; later trainings on the same text read them. "
        "Default: none.",
        metavar="DIR",
    )
    mtp_patience: int | None = _flag(
        None,
        "Stop after N evaluations without a longer expected accepted length, and keep the best checkpoint. "
        "Default: train to the end and keep the last.",
        allowed=("1 or more evaluations", FROM_1[1]),
        metavar="N",
    )
    mtp_hidden_state_mixing: bool = _flag(
        False,
        "In training, feed each MTP layer the hidden state of the trunk or any earlier layer, drawn at random. "
        "Default: the previous layer's.",
        alias="--mtp-hsm",
    )
    mtp_unroll: int | None = _flag(
        None,
        "How many times the repeated MTP layer is unrolled in training (training-time test, TTT). Default: "
        "--mtp-num-layers, which is also what the checkpoint holds.",
        allowed=("1 or more passes", FROM_1[1]),
        metavar="K",
    )
    mtp_repeated_layer_shares_kv: bool = _flag(
        False,
        "Let later passes of the repeated layer also attend to pass 1's keys and values, as method mtp_eagle "
        "drafts. Default: each pass to its own.",
    )
    mtp_repeated_layer_first_pass_kv: bool = _flag(
        False,
        "Let later passes of the repeated layer attend only to pass 1's keys and values, as in GLM-5.2 "
        "(index_share_for_mtp_iteration). Default: each pass to its own.",
    )
    mtp_train_only: bool = _flag(
        False,
        "Train only the MTP layers; trunk, embedding and output layer stay bit-identical and need no "
        "gradients or optimizer state. Default: train everything.",
    )
    mtp_mask_prompts: bool = _flag(
        False,
        "Compute losses and acceptance only on tokens generated by megatron-mtp sample; mask prompts and the "
        "ends of truncated samples. Default: all tokens.",
    )
    mtp_lr: float | None = _flag(
        None,
        "Peak learning rate of the MTP layers; their minimum is scaled like --min-lr. Default: --lr.",
        allowed=FROM_0,
        metavar="LR",
    )
    mtp_clip_grad: float | None = _flag(
        None,
        "Clip the gradients of the MTP layers by their own norm, separate from --clip-grad; 0 disables "
        "clipping. Default: one norm for everything.",
        allowed=FROM_0,
        metavar="X",
    )
    mtp_loss: str = _flag(
        "ce",
        "Loss of the MTP layers (see --list-losses), or several with their fractions of the training steps, "
        "such as lk:0.7,e2e_tv:0.3. Default: ce.",
    )
    mtp_loss_mix: str | None = _flag(
        None,
        "Weights of the losses in --mtp-loss mix, such as ce=0.2,tv=0.8, or of ce, kd and tv in this order, "
        "such as 0.2,0.4,0.4. Default: none.",
        metavar="NAME=W,...",
    )
    mtp_temperature: float = _flag(
        1.0,
        "Temperature of both distributions in losses that compare with the trunk's. Default: 1.",
        allowed=(f"a number from {COLDEST:g} to {HOTTEST:g}", lambda number: COLDEST <= number <= HOTTEST),
        metavar="T",
    )
    mtp_lk_eta: float = _flag(
        3.0,
        "How fast --mtp-loss lk shifts from kd to tv as the acceptance rate a rises: the weight of kd is "
        "exp(-ETA a). Default: 3.",
        allowed=("0 (kd alone) or more", FROM_0[1]),
        metavar="ETA",
    )
    mtp_label_smoothing: float = _flag(
        0.0,
        "Label smoothing of the MTP layers' cross-entropy: the probability that is spread over all tokens. Default: 0.",
        allowed=("0 or more, and less than 1", lambda number: 0 <= number < 1),
        metavar="S",
    )
    mtp_z_loss: float = _flag(
        0.0,
        "Weight of the z-loss (squared log-normalizer) in the MTP layers' cross-entropy. Default: 0.",
        allowed=FROM_0,
        metavar="Z",
    )
    mtp_loss_weights: str | None = _flag(
        None,
        "Loss weights of MTP layers 1 to D, such as 1,0.8,0.6; they are multiplied by lambda / D. Default: 1 each.",
        metavar="W1,W2,...",
    )
    mtp_loss_schedule: str = _flag(
        "constant",
        "How lambda changes from --mtp-loss-scaling-factor to --mtp-loss-final-factor: 'step' after "
        "--mtp-loss-schedule-steps steps, 'cosine' over these steps. Default: constant.",
        choices=("constant", *SCHEDULES),
    )
    mtp_loss_final_factor: float = _flag(
        0.0, "Lambda at the end of its schedule. Default: 0.", allowed=FROM_0, metavar="X"
    )
    mtp_loss_schedule_steps: float = _flag(
        0.0,
        "Length of lambda's schedule in training steps; below 1, a fraction of all steps. Default: 0.",
        allowed=("a number of steps, or a fraction below 1", FROM_0[1]),
        metavar="N",
    )
    mtp_token_fraction: float = _flag(
        1.0,
        "Fraction of positions on which MTP losses are computed, redrawn every step; the rest skip the output "
        "layer. Default: 1.",
        allowed=("a number above 0, and at most 1", lambda number: 0 < number <= 1),
        metavar="F",
    )
    mtp_draft_vocab_size: int | None = _flag(
        None,
        "Draft only the N most frequent tokens of --data-path, which makes the MTP layers' output layer "
        "smaller. Default: the checkpoint's list, or all tokens.",
        allowed=("1 or more, or leave the flag out to draft all tokens", FROM_1[1]),
        metavar="N",
    )
    mtp_draft_vocab_file: str | None = _flag(
        None,
        "Draft only the tokens in this text file, one token id per line. Default: none.",
        metavar="FILE",
    )
    drafter: str | None = _flag(
        None,
        "Train this drafter on the frozen trunk of --load, instead of MTP layers or together with "
        "--mtp-num-layers. Default: none.",
        choices=(*DRAFTERS,),
    )
    drafter_steps: int | None = _flag(
        None,
        "Number of tokens that the drafter learns to draft: unrolled steps (TTT), or the draft tokens of a block. "
        f"Default: {STEPS}.",
        allowed=FROM_1,
        metavar="K",
    )
    drafter_layers: Sequence[int] | None = _flag(
        None,
        "Trunk layers whose hidden states the drafter reads, counted from 1. Default: layers spread over the trunk "
        "(docs/guides/eagle3.md).",
        type=int,
        nargs="+",
        metavar="N",
    )
    drafter_ffn_hidden_size: int | None = _flag(
        None, "Hidden size of the drafter's MLP. Default: --ffn-hidden-size.", allowed=FROM_1, metavar="F"
    )
    drafter_num_attention_heads: int | None = _flag(
        None,
        "Attention heads of the drafter. Default: the trunk's; if the trunk has latent attention, as many as "
        "fill the hidden size.",
        allowed=FROM_1,
        metavar="N",
    )
    drafter_num_query_groups: int | None = _flag(
        None,
        "Key-value heads of the drafter. Default: the trunk's; if the trunk has latent attention, a quarter "
        "of the attention heads.",
        allowed=FROM_1,
        metavar="G",
    )
    drafter_kv_channels: int | None = _flag(
        None,
        "Channels per attention head of the drafter. Default: the trunk's; if the trunk has latent attention, "
        "128, or fewer for a small hidden size.",
        allowed=FROM_1,
        metavar="C",
    )
    drafter_norm_epsilon: float | None = _flag(
        None, "Epsilon of the drafter's norms. Default: the trunk's.", allowed=FROM_0, metavar="EPS"
    )
    drafter_rotary_base: float | None = _flag(
        None,
        "RoPE base of the drafter, which rotates whole heads. Default: --rotary-base.",
        allowed=FROM_1,
        metavar="THETA",
    )
    drafter_rope_scaling: str | None = _flag(
        None,
        'RoPE scaling of the drafter, as rope_scaling in config.json: {"rope_type": "yarn", "factor": 16}; '
        '{"rope_type": "default"} turns scaling off. Default: the trunk\'s.',
        metavar="JSON",
    )
    drafter_multi_latent_attention: Sequence[int] | None = _flag(
        None,
        f"Latent attention in {_readers('drafter_multi_latent_attention')}, with the trunk's sizes or these: query "
        "rank (0: none), key-value rank, query-key, rotary and value head dimensions. Default: grouped queries.",
        type=int,
        nargs="*",
        metavar="N",
    )
    drafter_window_size: int | None = _flag(
        None,
        "Sliding window of the drafter's layers, in positions, the current one included. Default: no window.",
        allowed=FROM_1,
        metavar="W",
    )
    mtp_linear_ce_main: bool = _flag(
        False,
        "Compute the trunk's loss in chunks of tokens too, so that its logits are never all in memory. "
        "Default: Megatron's own loss.",
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value, allowed, choices = getattr(self, one.name), one.metadata["allowed"], one.metadata["choices"]
            if value is None:
                continue
            if choices and value not in choices:
                raise ValueError(f"{flag_of(one.name)} is '{value}'; choose one of {', '.join(choices)}.")
            if allowed and not allowed[1](value):
                raise ValueError(f"{flag_of(one.name)} is {value}; give {allowed[0]}.")
            if one.name.startswith("drafter_") and self.drafter not in (readers := readers_of(one.name)):
                given = "without --drafter" if self.drafter is None else f"with --drafter {self.drafter}"
                kinds = " or ".join(filter(None, (", ".join(readers[:-1]), readers[-1])))
                raise ValueError(f"{flag_of(one.name)} was given {given}; give --drafter {kinds}, or drop it.")
        if self.drafter_multi_latent_attention:
            LatentSizes.given(self.drafter_multi_latent_attention)
        if self.drafter_rope_scaling is not None:
            parsed_scaling(self.drafter_rope_scaling, self.drafter_multi_latent_attention is not None)
        lengths = list(self.mtp_context_lengths or ())
        if lengths != sorted({*lengths}) or min(lengths, default=1) < 1:
            raise ValueError(
                f"--mtp-context-lengths is {' '.join(map(str, lengths))}; give rising numbers of tokens, 1 or more."
            )
        is_constant = self.mtp_loss_schedule == "constant"
        for is_wrong, sentence in (
            (
                self.mtp_hidden_state_mixing and self.mtp_architecture == "parallel",
                "--mtp-hidden-state-mixing was given with --mtp-architecture parallel, where every depth reads the "
                "trunk's state alone; drop one of the two.",
            ),
            (
                self.kind is not None and self.kind.fills_blocks and self.mtp_token_fraction != 1,
                f"--mtp-token-fraction was given with --drafter {self.drafter}, whose blocks are --drafter-blocks; "
                "give that.",
            ),
            (
                ("mix" in (name for name, _ in loss_parts(self.mtp_loss))) != (self.mtp_loss_mix is not None),
                f"--mtp-loss is {self.mtp_loss} and --mtp-loss-mix {self.mtp_loss_mix}; 'mix' needs its weights, and "
                "no other loss takes them.",
            ),
            (
                self.mtp_draft_vocab_size is not None and self.mtp_draft_vocab_file is not None,
                f"--mtp-draft-vocab-size {self.mtp_draft_vocab_size} and --mtp-draft-vocab-file "
                f"{self.mtp_draft_vocab_file} were given, but a file has its own size; drop one of the two.",
            ),
            (
                is_constant != (self.mtp_loss_schedule_steps == 0),
                f"--mtp-loss-schedule is {self.mtp_loss_schedule} and --mtp-loss-schedule-steps "
                f"{self.mtp_loss_schedule_steps:g}; all but 'constant' need a number of steps, and "
                "'constant' takes none.",
            ),
            (
                is_constant and self.mtp_loss_final_factor,
                f"--mtp-loss-final-factor is {self.mtp_loss_final_factor}, which a constant lambda never reaches; give "
                f"--mtp-loss-schedule {' or '.join(SCHEDULES)}, or drop the flag.",
            ),
        ):
            if is_wrong:
                raise ValueError(sentence)

    def apart(self) -> "tuple[MTPConfig, MTPConfig]":
        """Split into settings of the MTP layers and of the drafter trained with them, which gets its default loss."""
        assert self.drafter is not None
        own: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self) if "drafter" in one.name}
        without: dict[str, Any] = dict.fromkeys(own)
        return replace(self, **without), MTPConfig(**{**own, **DRAFTERS[self.drafter].loss})

    def phases(self) -> "list[MTPConfig]":
        """Return the settings for each loss in a sequence of losses; `phase_at` chooses one of them."""
        weights = {"mix": self.mtp_loss_mix}
        names = (name for name, _ in loss_parts(self.mtp_loss))
        return [replace(self, mtp_loss=name, mtp_loss_mix=weights.get(name)) for name in names]

    def phase_at(self, step: int, steps: int) -> int:
        """Return the index of the phase of a training step, both counted from 0; after the run, the last phase.

        Args:
            steps: number of steps of the run. With 10 steps, lk:0.7,e2e_tv:0.3 uses lk in steps 0 to 6.
        """
        ends = [round(end * steps) for end in accumulate(part for _, part in loss_parts(self.mtp_loss))]
        return min(bisect_right(ends, step), len(ends) - 1)

    @property
    def kind(self) -> DrafterKind | None:
        """Kind of the drafter; None without a drafter."""
        return None if self.drafter is None else DRAFTERS[self.drafter]

    def lambda_at(self, first: float, progress: float) -> float:
        """Return lambda at a progress of 0 to 1 through its schedule; `first` is the initial lambda."""
        return SCHEDULES[self.mtp_loss_schedule](first, self.mtp_loss_final_factor, progress)

    def loss_weights(self, depths: int) -> list[float]:
        """Return the loss weights of depths 1 .. D.

        Raises:
            ValueError: they are not D numbers of 0 or more, or all are 0.
        """
        given = self.mtp_loss_weights
        if given is None:
            return [1.0] * depths if self.kind is None else self.kind.weights(depths)
        numbers = [number_of(part) for part in given.split(",")]
        if len(numbers) != depths or not are_weights(numbers):
            raise ValueError(
                f"--mtp-loss-weights is '{given}'; give {depths} numbers of 0 or more (one for each of "
                f"{'--mtp-num-layers' if self.mtp_unroll is None else '--mtp-unroll'}), with commas, not all 0."
            )
        return numbers


if taken := sorted(OF_KINDS.keys() & MTPConfig.__annotations__.keys()):
    raise ValueError(f"{flag_of(taken[0])} is a flag of all drafters; rename the setting of {_readers(taken[0])}.")


def loss_parts(given: str, flag: str = "--mtp-loss") -> list[tuple[str, float]]:
    """Return the losses of a flag in order, each with its fraction of the training steps; a single loss has 1.

    Raises:
        ValueError: the fractions are not numbers above 0 that add up to 1.
    """
    if not {":", ","} & set(given):
        return [(given, 1.0)]
    parts = [(name, number_of(part)) for name, _, part in (word.partition(":") for word in given.split(","))]
    if all(part > 0 for _, part in parts) and math.isclose(sum(part for _, part in parts), 1):
        return parts
    raise ValueError(
        f"{flag} is '{given}'; give one loss, or several with their parts of the training steps, numbers above 0 that "
        "add up to 1, as in lk:0.7,e2e_tv:0.3."
    )


def number_of(text: str) -> float:
    """Convert text to a number, or nan if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def are_weights(numbers: Sequence[float]) -> bool:
    """Return whether all numbers are finite and at least 0, and one is above 0."""
    return all(0 <= number < math.inf for number in numbers) and any(numbers)
