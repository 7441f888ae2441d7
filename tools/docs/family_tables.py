"""Tables of docs/reference/families.md and docs/guides/convert.md: `python tools/docs/family_tables.py` prints them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from megatron_mtp.checkpoint.families import FAMILIES, all_families
from megatron_mtp.checkpoint.families.family import Family
from megatron_mtp.checkpoint.hf.forms.table import FORMS
from megatron_mtp.checkpoint.hf.quantized import COMPRESSED


def families_table(families: Iterable[Family]) -> str:
    """Return a Markdown row per family: its models, `model_type`s, MTP layers, and whether Megatron trains it."""
    rows = [
        (
            family.title,
            family.published,
            _code(family.model_types),
            _depths(family),
            "yes" if family.untrainable is None else f"no: {family.untrainable}",
        )
        for family in families
    ]
    return _markdown(("family", "models", "`model_type`", "MTP layers", "trained by Megatron here"), rows)


def trained_table(families: Iterable[Family]) -> str:
    """Return a Markdown row per form that a trained model can take: the models, the `model_type`, the engines."""
    rows = [
        (family.trained.models, _code(family.model_types[:1]), ", ".join(family.trained.engines))
        for family in families
        if family.trained is not None
    ]
    return _markdown(("model", "`model_type`", "for"), rows)


STANDINGS = {
    "trainable": "Megatron runs trunk and MTP layers",
    "attachable": "Megatron runs the trunk; the class has no MTP layers, `attach-mtp` makes them",
    "carried": "Megatron cannot run the trunk's layers: they are stored unchanged",
    "refused": "no conversion; `audit` compares a folder with the class",
}
"""Support levels of a class of models, and their meaning."""


def standing(model_type: str) -> str:
    """Return the support level of a model type: a key of `STANDINGS`."""
    family = FAMILIES.get(model_type)
    if family is None:
        return "refused"
    if family.untrainable is not None:
        return "carried"
    return "attachable" if family.depths is None else "trainable"


def classes_table(classes: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown row per support level: the number of classes, and their names unless they are rejected.

    Args:
        classes: the `model_type`s of every class; the first known one counts.
    """
    best = {name: min(map(standing, types), key=list(STANDINGS).index) for name, types in classes.items()}
    counts = Counter(best.values())
    rows = [(kind, meaning, str(counts[kind]), _named(best, kind)) for kind, meaning in STANDINGS.items()]
    return _markdown(("standing", "meaning", "classes", "names"), rows)


def forms_table() -> str:
    """Return a Markdown row per quantized format: tensors, methods, support here, and the engines."""
    rows = [
        (
            form.name,
            ", ".join(f"`{part.replace('|', '` or `')}`" for part in (form.numbers, *form.scales)),
            _code([*form.methods, *([COMPRESSED] if form.scheme else [])]),
            "form, scales, lists" if form.decode else "names, lists",
            "yes" if form.decode else "no",
            f"`{form.encoding.flag}`" if form.encoding else "",
            form.engines,
        )
        for form in FORMS
    ]
    return _markdown(("form", "tensors", "`quant_method`", "audit", "read", "`--quantize`", "loaded by"), rows)


def _named(best: Mapping[str, str], kind: str) -> str:
    names = (name.removesuffix("ForCausalLM") for name, found in best.items() if found == kind)
    return "all others" if kind == "refused" else ", ".join(sorted(names, key=str.lower))


def _depths(family: Family) -> str:
    if family.depths is None:
        return "none; `attach-mtp`" if family.untrainable is None else "none"
    return "any" if family.depths.limit is None else f"at most {family.depths.limit}"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


if __name__ == "__main__":
    print(trained_table(all_families()), families_table(all_families()), forms_table(), sep="\n\n")
