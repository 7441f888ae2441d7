"""Settings of the `attach` command, and the commands that it starts."""

from pathlib import Path

from megatron_mtp.cli import attach
from megatron_mtp.cli.attach_settings import AttachSettings
from megatron_mtp.cli.attach_steps import STEPS


def settings(model: Path, run: Path, *flags: str) -> AttachSettings:
    return attach.given_settings([str(model), "texts", str(run), *flags], "attach")


def command_of(step: str, args: AttachSettings) -> list[str] | None:
    return STEPS[step].left_command(args)
