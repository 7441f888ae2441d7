"""Names that users type and store: `golden/surface.json`, which `test_golden.py` compares.

    python tests/support/golden_surface.py     # rewrite the file after a change that CHANGELOG.md mentions

It lists this package's own flags by verb, and checkpoint keys of one tiny model per architecture. The layers' keys are
Megatron's; they are listed because each program loads what the other saves.
"""

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from documents import ROOT, commands

FILE = Path(__file__).parent / "golden" / "surface.json"
SOURCES = ("megatron_mtp", "scripts", "tools")
WRITTEN = (".py", ".cpp", ".sh", ".sbatch", "")
Names = dict[str, list[str]]


def record() -> dict[str, Any]:
    """Return everything in the order of the file; needs a Megatron process group."""
    from megatron_mtp.cli.verbs import VERBS

    return {
        "verbs": sorted(VERBS),
        "flags of ours": _flags(),
        "checkpoint keys": _checkpoint_keys(),
        "config keys": _config_keys(),
        "entry points": _entry_points(),
        "environment variables": sorted(_found(r"\b(MEGATRON_MTP_[A-Z_]+)\b")),
        "paths of the server": sorted(_found(r'@app\.(get|post)\("(/[^"]*)')),
    }


def _flags() -> Names:
    """Return flags of every command and of `convert`'s commands, without Megatron's and without `train`'s in others."""
    from argparse import ArgumentParser

    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser()
    add_megatron_arguments(parser)
    megatrons = parser._option_string_actions.keys()
    ours = {verb: flags - megatrons for verb, flags in sorted(commands().items())}
    extended = {verb for verb, flags in ours.items() if verb != "train" and flags >= ours["train"]}
    return {
        verb: ["those of train", *sorted(flags - ours["train"])] if verb in extended else sorted(flags)
        for verb, flags in ours.items()
    }


def _checkpoint_keys() -> Names:
    """Return checkpoint keys, with `#` for layer numbers."""
    from hybrid_single import our_hybrid
    from megatron_single import LATENT, MOE, our_model

    models = {
        "GPT, two depths": our_model(2),
        "GPT, no depths, tied": our_model(None, tied=True),
        "GPT, two parallel heads": our_model(2, architecture="parallel"),
        "GPT, a repeated depth, tied": our_model(1, tied=True, mtp_use_repeated_layer=True, shares_kv=True),
        "GPT, a draft vocabulary": our_model(1, drafted=list(range(32))),
        "GPT, experts": our_model(1, **MOE),
        "GPT, latent attention": our_model(1, **LATENT),
        "hybrid, one depth": our_hybrid("M*-G-/*-"),
        "hybrid, two parallel heads": our_hybrid("M*-/M-/M-", architecture="parallel"),
    }
    return {name: _keys(entry.key for entry in model.sharded_state_dict().values()) for name, model in models.items()}


def _keys(keys: Iterable[str]) -> list[str]:
    return sorted({re.sub(r"(?<=layers\.)\d+", "#", key) for key in keys if not key.endswith("_extra_state")})


def _config_keys() -> Names:
    """Return keys of `--speculative-config`, fields of MTPConfig (flags and stored arguments), and names of losses."""
    from megatron_mtp.decoding.config import COMMON_KEYS, PROPOSERS, VERIFIERS, keys
    from megatron_mtp.losses.table import LOSSES
    from megatron_mtp.spec.config import MTPConfig

    made = {"speculative config": COMMON_KEYS, "MTPConfig": [field.name for field in fields(MTPConfig)]}
    for kind, table in (("method", PROPOSERS), ("verifier", VERIFIERS)):
        made |= {f"{kind} {name}": [key.name for key in keys(part.settings_kind)] for name, part in table.items()}
    return {name: sorted(names) for name, names in (made | {"losses": [*LOSSES]}).items()}


def _entry_points() -> Names:
    """Return entry point groups that other packages may extend, and what this package declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "groups": sorted(_found(r'Registry\(\s*"(megatron_mtp\.\w+)"')),
        **{f"declared in {group}": sorted(names) for group, names in project.get("entry-points", {}).items()},
        "scripts": sorted(project["scripts"]),
        "extras": sorted(project["optional-dependencies"]),
    }


def _found(pattern: str) -> set[str]:
    """Return the regex groups of every match in the sources of the package and its scripts."""
    files = [path for room in SOURCES for path in (ROOT / room).rglob("*") if path.is_file()]
    texts = (path.read_text(encoding="utf-8") for path in files if path.suffix in WRITTEN)
    return {" ".join(match.groups()) for text in texts for match in re.finditer(pattern, text)}


def write() -> None:
    """Write `golden/surface.json`."""
    FILE.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from megatron_mtp.megatron.runtime import prepare

    prepare()
    from megatron_single import join_world_of_one

    join_world_of_one()
    write()
