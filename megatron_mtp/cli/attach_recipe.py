"""Settings of a recipe as flags of `megatron-mtp attach`, which sets some flags of `train` itself."""

from megatron_mtp.cli.attach_settings import names_of
from megatron_mtp.common.errors import Parser
from megatron_mtp.training import recipe
from megatron_mtp.training.config_file import named_flags

OF_ATTACH = {
    "lr": "learning-rate",
    "mtp-loss": "loss",
    "mtp-num-layers": "mtp-layers",
    "mtp-unroll": "unroll",
    "drafter": "drafter",
}
"""Flags of `train` for which attach has its own name."""

SET_BY_ATTACH = ("mtp-num-layers", "mtp-use-repeated-layer", "mtp-train-only", "mtp-loss-scaling-factor")
"""Settings that are the same in every training by attach with passes of one layer."""


def recipe_words(name: str, own: Parser, arguments: list[str]) -> list[str]:
    """Print and return the words that a recipe adds to a command line of attach.

    Raises:
        ValueError: there is no such recipe, it trains the trunk, or it is for another kind of drafter.
    """
    chosen, typed = recipe.read(name), named_flags(arguments, own)
    if chosen.trunk == "trained":
        raise ValueError(
            f"--recipe is {name}, which trains the trunk with its layers, and attach does not; give train."
        )
    given = {flag for flag, here in OF_ATTACH.items() if here in typed} | {word[2:] for word in names_of(arguments)}
    for line in chosen.lines(given):
        print(f"> {line}")
    left = chosen.left(given)
    if "mtp-num-layers" in given:
        left.pop("mtp-unroll", None)
    is_drafter = "drafter" in chosen.settings  # its loss may be a mix, which --loss does not accept
    names = {flag: flag if flag == "mtp-loss" and is_drafter else OF_ATTACH.get(flag, flag) for flag in left}
    return recipe.words_of({names[flag]: value for flag, value in left.items() if flag not in SET_BY_ATTACH})
