"""Flags of the MTP layers, for any parser and without importing Megatron; and flags from a YAML file.

`--config run.yaml` reads the flags of a run from a file:

    model:                       # section names are free and have no effect
      num-layers: 4              # --num-layers 4; num_layers is equivalent
      swiglu: true               # --swiglu; false leaves it out
    data:
      data-path: [0.7, a, 0.3, b]    # --data-path 0.7 a 0.3 b
    lr: 1e-3

`--no-swiglu` on the command line unsets a switch from the file. Values are read as text, so 90,10,0 and 1e-3 are not
converted.
"""

from argparse import ArgumentParser, BooleanOptionalAction, _ActionsContainer
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import MethodType
from typing import get_args

import yaml

from megatron_mtp.common.errors import Parser, add_foreign_flags, flags_meant
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
    # configurations of models, papers
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
    for action in parser._actions:  # `--help` of megatron-core 0.19 fails at a percent sign
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
        for alias in names[1:]:  # Megatron 0.20 has --mtp-hsm, for blocks of its own: ours are built in their place
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


# --- --config --------------------------------------------------------------------------------------------------------

NOT_IN_A_FILE = {"config", "dry-run", "help", "help-megatron", "list-losses", "recipe", "verbose"}
"""Flags that take effect before the file is read."""

SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def flags_of(file: Path, parser: ArgumentParser) -> list[str]:
    """Convert the flags of a file to command-line words; `parser` has all flags.

    Raises:
        ValueError: the file cannot be read, has an unknown flag, a flag twice, or a value that the flag does not
            accept.
    """
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        entries = [] if root is None else list(_entries(root))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"--config is {file}, which cannot be read as YAML ({said}); correct it.") from error
    except RecursionError:  # a section may be an alias of one that it is in
        raise ValueError(f"--config is {file}, whose sections are nested too deeply; write fewer levels.") from None
    words, seen = [], dict[str, int]()
    for key, value in entries:
        name, line = key.value.replace("_", "-"), key.start_mark.line + 1
        flag, where = f"--{name}", f"--config {file}, line {line}"
        action = parser._option_string_actions.get(flag)
        if name in NOT_IN_A_FILE:
            raise ValueError(f"{where}: '{key.value}' cannot be in a file; give {flag} on the command line.")
        if action is None:
            hint = flags_meant([flag], parser) or "; --help-megatron lists all flags."
            raise ValueError(f"{where}: there is no flag {flag}{hint}")
        if name in seen:
            raise ValueError(f"{where}: '{key.value}' is in line {seen[name]} already; remove one of the two.")
        seen[name] = line
        if isinstance(value, yaml.SequenceNode):
            given = [item.value for item in value.value if isinstance(item, yaml.ScalarNode)]
            if action.nargs not in ("*", "+") or len(given) != len(value.value):
                raise ValueError(f"{where}: {flag} does not take a list; give one value.")
            words += [flag, *given]
        elif action.nargs == 0 and not value.tag.endswith(":null"):
            if (is_on := SWITCH.get(value.value.lower())) is None:
                raise ValueError(f"{where}: {flag} is a switch, and was given '{value.value}'; give true or false.")
            off = [f"--no-{name}"] if isinstance(action, BooleanOptionalAction) else []
            words += [flag] if is_on else off
        elif not value.tag.endswith(":null"):
            words += [flag, value.value]
    return words


def named_flags(words: list[str], parser: ArgumentParser) -> set[str]:
    """Return the names of the arguments that these words set, with hyphens.

    Abbreviated flags are resolved as by argparse.
    """
    known = parser._option_string_actions
    names = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    actions = [action for flag, action in known.items() if flag in names]
    for short in names - known.keys():
        actions += [action for flag, action in known.items() if flag.startswith(short)]
    return {action.dest.replace("_", "-") for action in actions}


def without_unset(words: list[str], typed: list[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Join the words of a file and of the command line, without switches that `--no-X` unsets."""
    known = parser._option_string_actions
    switches = {word for word in words if word in known and known[word].nargs == 0}
    unset = {f"--no-{word[2:]}": word for word in switches if f"--no-{word[2:]}" not in known}
    gone = {unset[word] for word in typed if word in unset}
    return [word for word in words if word not in gone], [word for word in typed if unset.get(word) not in gone]


def _entries(node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield keys and values, including those of sections."""
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("it holds no keys with values; write lines such as 'num-layers: 4'")
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode):
            yield from _entries(value)
        elif isinstance(key, yaml.ScalarNode):
            yield key, value
        else:
            raise ValueError(f"line {key.start_mark.line + 1}: a key is not a name of a flag")
