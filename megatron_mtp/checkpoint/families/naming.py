"""Tensors with a wrong prefix that no loader looks for: what to rename, and to what.

language_model.mtp.fc.weight                          mtp.fc.weight
base_model.model.model.layers.4.eh_proj.weight        model.layers.4.eh_proj.weight
model.layers.4._orig_mod.eh_proj.weight               model.layers.4.eh_proj.weight

MTP layers with such names exist but are missing for every loader.
"""

from collections.abc import Collection, Iterable

WRAPPERS = {
    "base_model.model.": "peft",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "module.": "DDP",
}
"""What module wrappers add to names, and which wrapper it is."""
_AT_THE_BEGINNING = ("base_model.model.", "module.")
_AROUND = frozenset(("model", "language_model", "text_model", "thinker", "llm"))
"""Names of models in a model, which may be wrong without another tensor being meant."""


def unwrapped(name: str) -> str:
    """Remove from a name what wrappers have added."""
    before = None
    while name != before:
        before = name
        for wrapper in WRAPPERS:
            name = name.removeprefix(wrapper) if wrapper in _AT_THE_BEGINNING else name.replace(wrapper, "")
    return name


def misnamed(stored: Collection[str], wanted: Iterable[str]) -> dict[str, str]:
    """Return stored tensors with a wrong name, each with the correct one; empty if none is a wanted tensor.

    Args:
        stored: names in a folder.
        wanted: names that the folder's family uses.
    """
    known = {*wanted}
    missing = {_inner(name): name for name in known if name not in stored}
    found = {name: missing[_inner(name)] for name in stored if name not in known and _inner(name) in missing}
    others = [name for name in stored if name not in known and name not in found]  # some may have no rules
    if any(unwrapped(name) != name for name in found):
        found |= {name: unwrapped(name) for name in others if unwrapped(name) != name}
    for wrong, right in {_root(*pair) for pair in found.items()}:
        found |= {name: right + name.removeprefix(wrong) for name in others if name.startswith(wrong)}
    return dict(sorted(found.items()))


def _root(wrong: str, right: str) -> tuple[str, str]:
    """Return the prefixes of two names, up to the first common part and its number: 'x.mtp.' and 'mtp.'."""
    one, other = wrong.split("."), right.split(".")
    same = next((n for n, pair in enumerate(zip(one[::-1], other[::-1], strict=False)) if len({*pair}) > 1), None)
    tail = one[len(one) - (min(len(one), len(other)) if same is None else same) :]
    kept = tail[: 2 if len(tail) > 1 and tail[1].isdigit() else 1]
    heads = (name[: len(name) - len(tail)] for name in (one, other))
    wrong, right = (".".join([*head, *kept, ""]) for head in heads)
    return wrong, right


def _inner(name: str) -> str:
    return ".".join(part for part in unwrapped(name).split(".") if part not in _AROUND)


def renaming(found: dict[str, str], family: str) -> str:
    """Return the end of a message about tensors found by `misnamed`: their names, and what to do."""
    name, right = next(iter(found.items()))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    are, it, rename = (
        ("are not names", "them", "rename them all alike") if others else ("is not a name", "it", "rename it")
    )
    wrapper = next((made for made in WRAPPERS if made in name and made not in right), None)
    by = f", because {WRAPPERS[wrapper]} put '{wrapper}' into {it}" if wrapper else ""
    return f"'{name}'{others}, which {are} of {family}{by}; the family's name is '{right}'; {rename}"
