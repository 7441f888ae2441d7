"""`megatron-mtp recipes [NAME]`: published training settings, for `--recipe` of `train` and `attach`."""

from megatron_mtp.common.command import status_of
from megatron_mtp.common.errors import Parser
from megatron_mtp.training import recipe

EXAMPLES = """examples:
  megatron-mtp recipes
  megatron-mtp recipes dspark
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/boosted --recipe nemotron-mtp-boost
"""


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="List the recipes by which others train MTP layers and drafters, or print one: its flags, "
        "its sources, and what it reached.",
        epilog=EXAMPLES,
    )
    made.add_argument("name", nargs="?", metavar="NAME", help="print this recipe; default: the list")
    return made


def main(arguments: list[str], program: str) -> int:
    """Print the list, or one recipe. An unknown name ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    return status_of(program, lambda: show(args.name))


def show(name: str | None) -> int:
    """Print the list (None), or one recipe. Raise ValueError if there is none with this name."""
    if name is None:
        for each in map(recipe.read, recipe.names()):
            print(f"{each.name:<20}{each.purpose}\n{'':<20}{recipe.shown(each.settings)}")
        return 0
    chosen = recipe.read(name)
    print(f"{chosen.name}: {chosen.purpose}")
    print(f"trunk: {chosen.trunk}\nflags: {recipe.shown(chosen.settings)}")
    for title in ("source", "differs", "there", "here"):
        for line in getattr(chosen, title):
            print(f"{title}: {line}")
    return 0
