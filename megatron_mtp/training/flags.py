"""The flags of the depths, added to any parser without importing Megatron; and a parser of them and Megatron's."""

from argparse import ArgumentParser
from dataclasses import fields
from types import MethodType

from megatron_mtp.config import MTPConfig, add_yarn_arguments
from megatron_mtp.errors import Parser
from megatron_mtp.losses import LOSSES


def add_mtp_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Megatron's `extra_args_provider`: one flag for every field of `MTPConfig`."""
    parser.error = MethodType(Parser.error, parser)  # type: ignore[method-assign]  # Megatron's usage is 900 lines
    _repair_help(parser)
    group = parser.add_argument_group("multi-token prediction (megatron-mtp)")
    for field in fields(MTPConfig):
        flag, described = "--" + field.name.replace("_", "-"), {**field.metadata}
        if field.name == "mtp_loss":
            described["metavar"] = "{" + ",".join(LOSSES.names()) + "}"
        names = [flag, described.pop("alias")] if "alias" in described else [flag]
        group.add_argument(*names, dest=field.name, default=field.default, **described)
    return add_yarn_arguments(parser)


def all_parser(program: str) -> ArgumentParser:
    """A parser with Megatron's flags too; call `runtime.prepare` before."""
    from megatron.training.arguments import add_megatron_arguments

    return add_mtp_arguments(add_megatron_arguments(ArgumentParser(program)))


def _repair_help(parser: ArgumentParser) -> None:
    """Escape the percent sign in a help text of megatron-core 0.19, at which `--help` fails."""
    for action in parser._actions:
        try:
            (action.help or "") % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")
