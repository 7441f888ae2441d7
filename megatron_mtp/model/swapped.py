"""Classes of a spec, and names of modules, swapped for others."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


def with_modules(spec: Any, swaps: dict[Any, Any]) -> Any:
    """Return the spec with classes replaced by `swaps`, wherever they occur."""
    if isinstance(spec, list):
        return [with_modules(one, swaps) for one in spec]
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(
            spec, module=with_modules(spec.module, swaps), submodules=with_modules(spec.submodules, swaps)
        )
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        swapped = {field.name: with_modules(getattr(spec, field.name), swaps) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **swapped)
    return swaps.get(spec, spec) if isinstance(spec, type) else spec


@contextmanager
def having(modules: list[ModuleType], **values: Any) -> Iterator[None]:
    """Within this context, set these names to other values in all modules that have them."""
    before = [(module, name, getattr(module, name)) for module in modules for name in values if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, values[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
