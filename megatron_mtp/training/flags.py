"""Flags of the MTP layers, for any parser and without importing Megatron."""

from argparse import ArgumentParser, _ActionsContainer
from dataclasses import fields
from types import MethodType
from typing import get_args

from megatron_mtp.common.errors import Parser, add_foreign_flags
from megatron_mtp.losses.table import LOSSES
from megatron_mtp.megatron.parser import add_yarn_arguments
from megatron_mtp.spec.config import OF_KINDS, MTPConfig, flag_of

_STEPS = "--drafter-steps (of a drafter) or --mtp-unroll (of a repeated MTP layer)"
_FROM_FOLDER = "--load, a checkpoint that megatron-mtp convert hf-to-mcore makes of it"
_CORPUS = "--data-path, a corpus that megatron-mtp preprocess makes, or --chat"
OF_OTHER_TRAINERS = {
    # Megatron-LM 0.20, Megatron-Bridge
    "--freeze-base-model-for-mtp": "--mtp-train-only",
    # SpecForge, speculators, ModelOpt, NeMo-RL
    **dict.fromkeys(("--ttt-steps", "--ttt-length", "--rollout-steps", "--num-speculative-steps"), _STEPS),
    "--draft-vocab-size": "--mtp-draft-vocab-size",
    "--target-layer-ids": "--drafter-layers",
    "--block-size": "--drafter-steps",
    "--num-anchors": "--drafter-blocks",
    **dict.fromkeys(("--target-model-path", "--verifier-name-or-path", "--model-name-or-path"), _FROM_FOLDER),
    # model configs, papers
    **dict.fromkeys(("--num-nextn-predict-layers", "--num-mtp-layers", "--mtp-depth"), "--mtp-num-layers"),
    **dict.fromkeys(("--mtp-loss-weight", "--mtp-lambda"), "--mtp-loss-scaling-factor"),
    # transformers, TRL, axolotl, LLaMA-Factory
    **dict.fromkeys(("--max-steps", "--num-steps", "--max-train-steps"), "--train-iters"),
    **dict.fromkeys(("--num-train-epochs", "--num-epochs", "--epochs"), "--train-samples, the sequences of all epochs"),
    "--per-device-train-batch-size": "--micro-batch-size",
    "--gradient-accumulation-steps": "--global-batch-size, the sequences of a step on all ranks",
    **dict.fromkeys(("--max-length", "--max-seq-length", "--max-seq-len", "--cutoff-len"), "--seq-length"),
    "--learning-rate": "--lr",
    "--lr-scheduler-type": "--lr-decay-style",
    "--warmup-steps": "--lr-warmup-iters",
    "--warmup-ratio": "--lr-warmup-fraction",
    "--max-grad-norm": "--clip-grad",
    "--output-dir": "--save",
    "--resume-from-checkpoint": "--load",
    "--save-steps": "--save-interval",
    "--eval-steps": "--eval-interval",
    "--logging-steps": "--log-interval",
    **dict.fromkeys(("--dataset", "--train-file", "--train-data-file"), _CORPUS),
    "--gradient-checkpointing": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
"""Flags of other trainers, and what to use instead."""


def add_mtp_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add one flag for every field of `MTPConfig`. Used as Megatron's `extra_args_provider`."""
    add_foreign_flags(parser, OF_OTHER_TRAINERS)
    parser.parse_args = MethodType(Parser.parse_args, parser)  # type: ignore[method-assign]
    parser.error = MethodType(Parser.error, parser)  # type: ignore[method-assign]  # Megatron's usage is 900 lines
    for action in parser._actions:  # in megatron-core 0.19, a percent sign breaks `--help`
        try:
            (action.help or "") % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")
    group = parser.add_argument_group("multi-token prediction (megatron-mtp)")
    for field in sorted(fields(MTPConfig), key=lambda one: one.name in OF_KINDS):
        described = {name: value for name, value in field.metadata.items() if name not in ("allowed", "choices")}
        kind = (get_args(field.type) or (field.type,))[0]
        described |= {"action": "store_true"} if kind is bool else {"type": kind} if kind in (int, float) else {}
        if field.name == "mtp_loss":
            described["metavar"] = "{" + ",".join(LOSSES.names()) + "}"
        names = [flag_of(field.name), *(described.pop(name) for name in ("alias",) if name in described)]
        for alias in names[1:]:  # Megatron 0.20 has --mtp-hsm for its own blocks, which ours replace
            if (theirs := parser._option_string_actions.get(alias)) is not None:
                parser._handle_conflict_resolve(theirs, [(alias, theirs)])
                parser.set_defaults(**{theirs.dest: theirs.default})
        group.add_argument(*names, dest=field.name, default=field.default, **described)
    return add_yarn_arguments(add_chat_arguments(parser))


def add_chat_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the chat flags of `train`. For chats that `preprocess --chat` has tokenized, use `--data-path`."""
    group = parser.add_argument_group("chats (megatron-mtp)")
    group.add_argument(
        "--chat",
        nargs="+",
        metavar="FILE",
        help="Train on the assistant's tokens of chats: JSON lines with 'messages' or 'conversations', rendered with "
        "the chat template of --tokenizer-model and cached in --data-cache-path.",
    )
    add_counting_arguments(group)
    group.add_argument(
        "--show-example",
        action="store_true",
        help="Before the first step, print the first chat as it is trained on, trained tokens in \u27e6 \u27e7.",
    )
    return parser


CHAT_FLAGS = ("chat_count_empty_thinking", "chat_mask_history", "chat_skip_bad_lines")
"""Flags that have no effect without --chat."""


def add_counting_arguments(group: _ActionsContainer) -> None:
    """Add the flags shared by all commands that tokenize chats to a data set."""
    group.add_argument(
        "--chat-count-empty-thinking",
        action="store_true",
        default=None,
        help="Also train on empty thinking blocks that the chat template can add to the generation prompt. Default: "
        "masked, since the model does not write them.",
    )
    group.add_argument(
        "--chat-mask-history",
        action="store_true",
        default=None,
        help="Train only on the last assistant message of each chat (mask_history, last_round, train_on_last). "
        "Default: on all, except those that fields such as 'weight': 0 exclude.",
    )
    group.add_argument(
        "--chat-skip-bad-lines",
        action="store_true",
        default=None,
        help="Skip lines that cannot be trained on and report how many. Default: stop with a list of them.",
    )


def all_parser(program: str) -> ArgumentParser:
    """Create a parser that has Megatron's flags too. Call `runtime.prepare` first."""
    from megatron.training.arguments import add_megatron_arguments

    return add_mtp_arguments(add_megatron_arguments(ArgumentParser(program)))
