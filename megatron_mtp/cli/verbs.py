"""Table of commands. Each command is a module that is imported when the command is called.

The module has `parser(program) -> ArgumentParser`, which does not import torch, and `main(arguments, program) -> int`,
which parses once, then imports what is slow, and returns the exit status. `train` also has `full_parser(program)` with
Megatron's flags.

Other packages add commands by the entry point group `megatron_mtp.verbs`; the entry point names a `Verb`.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from megatron_mtp.spec.registry import Registry

PROGRAM = "megatron-mtp"


@dataclass(frozen=True)
class Verb:
    """A command of `megatron-mtp`.

    Attributes:
        line: its line in `--help`.
        module: dotted name of its module.
    """

    line: str
    module: str


VERBS: Registry[Verb] = Registry(
    "megatron_mtp.verbs",
    {
        "train": Verb("train a model with MTP layers or a drafter", "megatron_mtp.cli.train"),
        "attach": Verb(
            "add MTP layers or a drafter to a Hugging Face model: train, measure, export",
            "megatron_mtp.cli.attach",
        ),
        "evaluate": Verb("report loss and acceptance by depth of a checkpoint", "megatron_mtp.cli.evaluate"),
        "convert": Verb(
            "convert, inspect, edit and verify checkpoints",
            "megatron_mtp.cli.convert",
        ),
        "audit": Verb("describe a checkpoint, or explain how two differ", "megatron_mtp.cli.audit"),
        "generate": Verb("generate text with speculative decoding", "megatron_mtp.cli.generate"),
        "serve": Verb(
            "serve a checkpoint over an OpenAI-compatible API with speculative decoding", "megatron_mtp.cli.serve"
        ),
        "sample": Verb("generate training data for MTP layers from prompts of a corpus", "megatron_mtp.cli.sample"),
        "check": Verb(
            "compare measured acceptance, local or from a server, with the recorded values",
            "megatron_mtp.cli.check",
        ),
        "recipes": Verb("list recipes of MTP layers and drafters, for --recipe", "megatron_mtp.cli.recipes"),
        "preprocess": Verb("tokenize text for training", "megatron_mtp.cli.preprocess"),
        "doctor": Verb("check the environment for missing or slow components", "megatron_mtp.cli.doctor"),
    },
)


def module_of(verb: str) -> ModuleType:
    """Import the module of a command."""
    return import_module(VERBS[verb].module)
