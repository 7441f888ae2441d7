"""The families as the tables of docs/conversion.md: `python -m megatron_mtp.checkpoint.families.table` prints them."""

from collections.abc import Iterable, Sequence

from megatron_mtp.checkpoint.families import all_families
from megatron_mtp.checkpoint.families.family import Depths, Family


def families_table(families: Iterable[Family]) -> str:
    """Markdown, a row per family: its models, `model_type`s and depths, and whether Megatron trains it here."""
    rows = [
        (
            family.title,
            family.published,
            _code(family.model_types),
            _depths(family.depths),
            "yes" if family.untrainable is None else f"no: {family.untrainable}",
        )
        for family in families
    ]
    return _markdown(("family", "models", "`model_type`", "depths", "trained by Megatron here"), rows)


def trained_table(families: Iterable[Family]) -> str:
    """Markdown, a row per form that a trained model can take: the models, the `model_type`, the engines."""
    rows = [
        (family.trained.models, _code(family.model_types[:1]), ", ".join(family.trained.engines))
        for family in families
        if family.trained is not None
    ]
    return _markdown(("model", "`model_type`", "for"), rows)


def _depths(depths: Depths | None) -> str:
    if depths is None:
        return "none; `attach-mtp`"
    return "any" if depths.limit is None else f"at most {depths.limit}"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


if __name__ == "__main__":
    print(trained_table(all_families()), families_table(all_families()), sep="\n\n")
