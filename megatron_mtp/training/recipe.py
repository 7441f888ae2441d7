"""Recipes: named sets of `train` flags, with sources and published results.

Each file in `recipes/` is a recipe:

    purpose: improve a native MTP layer on the frozen trunk
    trunk: frozen                     # or trained: the trunk is trained together with the layers
    source: [arXiv:2606.15007, section 3.4]
    settings:                         # flags of `train` without dashes; true for a switch
      mtp-loss: kd
    differs: [parts of the source that no flag reproduces]
    there: [published results]
    here: [results with this package]

Flags on the command line take precedence.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources

import yaml

from megatron_mtp.common.errors import did_you_mean

FOLDER = resources.files(__package__) / "recipes"
MEANINGLESS_WITHOUT = {
    "mtp-loss-mix": "mtp-loss",
    "mtp-loss-final-factor": "mtp-loss-schedule",
    "mtp-loss-schedule-steps": "mtp-loss-schedule",
}
"""Settings that refine another setting. If a command line gives the other setting, both are left out of the recipe."""


@dataclass(frozen=True)
class Recipe:
    """Contents of a recipe's file; `settings` are flags of `train`, without dashes, in order."""

    name: str
    purpose: str
    trunk: str
    source: list[str]
    settings: Mapping[str, str]
    differs: list[str]
    there: list[str]
    here: list[str]

    def left(self, given: Collection[str]) -> dict[str, str]:
        """Return the settings that a command line with these flags (without dashes) does not override.

        Raises:
            ValueError: the recipe is for a drafter and the command line asks for MTP layers, or the reverse.
        """
        kind = self.settings.get("drafter")
        if kind is None and "drafter" in given:
            raise ValueError(f"--recipe {self.name} is for MTP layers, and was given with --drafter; drop one of them.")
        if kind is not None and "mtp-num-layers" in given and "drafter" not in given:
            raise ValueError(
                f"--recipe {self.name} is for --drafter {kind}, and was given with MTP layers; drop one of them."
            )
        return {
            name: value
            for name, value in self.settings.items()
            if name not in given and MEANINGLESS_WITHOUT.get(name) not in given
        }

    def lines(self, given: Collection[str]) -> list[str]:
        """Return a line for each setting of the recipe on such a command line, and for each that is overridden."""
        left = self.left(given)
        gone = [f"--{name}" for name in self.settings if name not in left]
        made = [f"recipe {self.name} sets {shown(left) or 'nothing'}"]
        return made + ([f"the command line overrides its {' '.join(gone)}"] if gone else [])


def shown(settings: Mapping[str, str]) -> str:
    """Format settings as on a command line."""
    return " ".join(f"--{name}" if value == "true" else f"--{name} {value}" for name, value in settings.items())


def words_of(settings: Mapping[str, str]) -> list[str]:
    """Convert settings to words of a command line, one each: unknown flags with their values stay together."""
    return [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in settings.items()]


def names() -> list[str]:
    """Return the names of the recipes, in alphabetical order."""
    return sorted(file.name.removesuffix(".yaml") for file in FOLDER.iterdir())


def read(name: str) -> Recipe:
    """Read the recipe with this name. Raise ValueError if there is none."""
    known = names()
    if name not in known:
        raise ValueError(f"--recipe is '{name}'; choose one of {', '.join(known)}{did_you_mean([name], known) or '.'}")
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return Recipe(name, **yaml.load(text, Loader=yaml.BaseLoader))
