"""Keeps the previous release's documented imports working for one release, with a warning that gives the new name."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import override

OLD_NAMES = {
    "megatron_mtp.config": "megatron_mtp.spec.config",
    "megatron_mtp.runtime": "megatron_mtp.megatron.runtime",
    "megatron_mtp.files": "megatron_mtp.common.files",
    "megatron_mtp.acceptance": "megatron_mtp.common.acceptance",
    "megatron_mtp.checkpoint.mcore": "megatron_mtp.megatron.checkpoint",
    "megatron_mtp.checkpoint.mcore.iterations": "megatron_mtp.megatron.checkpoint.iterations",
    "megatron_mtp.checkpoint.mcore.reader": "megatron_mtp.megatron.checkpoint.reader",
    "megatron_mtp.checkpoint.mcore.model": "megatron_mtp.checkpoint.model",
}
"""Module names of the previous release, and their present names."""


class _Moved(MetaPathFinder, Loader):
    """Loader of a module under an old name, with the contents of the module under the new name."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in OLD_NAMES:
            return None
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in OLD_NAMES))

    @override
    def exec_module(self, module: ModuleType) -> None:
        moved = import_module(OLD_NAMES[module.__name__])
        warnings.warn(f"{module.__name__} is {moved.__name__} now; import that.", DeprecationWarning, stacklevel=2)
        vars(module).update({name: value for name, value in vars(moved).items() if not name.startswith("__")})


def keep_old_names() -> None:
    """Redirect imports of `OLD_NAMES` to the modules' new places."""
    sys.meta_path.append(_Moved())
