"""The table of verbs: a verb is one module, which is imported when the verb is called.

The module has `parser(program) -> ArgumentParser`, which imports no torch, and `main(arguments, program) -> int`, which
parses once, then imports what is heavy, and returns the exit status. `train` has `full_parser(program)` as well, with
the flags of Megatron.

Other packages add verbs by the entry point group `megatron_mtp.verbs`; the entry point names a `Verb`.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from megatron_mtp.registry import Registry

PROGRAM = "megatron-mtp"


@dataclass(frozen=True)
class Verb:
    """A verb of `megatron-mtp`.

    Attributes:
        line: its line in `--help`.
        module: the dotted name of its module.
    """

    line: str
    module: str


VERBS: Registry[Verb] = Registry(
    "megatron_mtp.verbs",
    {
        "train": Verb("pretrain a GPT, with Megatron's flags and --mtp-*", "megatron_mtp.cli.train"),
        "convert": Verb(
            "convert between Hugging Face folders and Megatron checkpoints; inspect and verify them",
            "megatron_mtp.cli.convert",
        ),
        "audit": Verb(
            "show what anyone's checkpoint holds, or what differs between two, and why", "megatron_mtp.cli.audit"
        ),
        "attach": Verb(
            "add MTP layers to a Hugging Face model: train on its frozen trunk, measure, export",
            "megatron_mtp.cli.attach",
        ),
        "generate": Verb("generate text from a checkpoint, several tokens per forward", "megatron_mtp.cli.generate"),
        "sample": Verb(
            "continue a corpus' prompts by a checkpoint: data to train its MTP layers on", "megatron_mtp.cli.sample"
        ),
        "serve": Verb(
            "answer OpenAI's HTTP API with a checkpoint, many texts at once, each drafting", "megatron_mtp.cli.serve"
        ),
        "evaluate": Verb("compute loss and acceptance by depth of a checkpoint on a text", "megatron_mtp.cli.evaluate"),
        "check": Verb(
            "compare what a model's drafts reach, here or behind a server, with what was recorded",
            "megatron_mtp.cli.check",
        ),
        "doctor": Verb("show what this machine has, and what missing parts cost", "megatron_mtp.cli.doctor"),
        "preprocess": Verb("turn text into the .bin and .idx that train reads", "megatron_mtp.cli.preprocess"),
    },
)


def module_of(verb: str) -> ModuleType:
    """The module of a verb."""
    return import_module(VERBS[verb].module)
