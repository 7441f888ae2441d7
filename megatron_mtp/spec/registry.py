"""Registries: tables by name that other installed packages can extend through entry points.

    [project.entry-points."megatron_mtp.losses"]     # or .proposers, .verifiers, .families, .verbs
    focal = "my_package.focal:Focal"

adds the loss `focal` to the table of losses. Entry points are read only to look up a name that this package does not
define, or to list a table; so built-in names are fast to look up and cannot be replaced. The package's own extensions
use the same entry points. If an extension's folder was removed, its entry points, which the installed metadata still
lists, are skipped.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

NAME, EXTENSIONS = "megatron-mtp", "megatron_mtp.extensions."


class Registry[T](Mapping[str, T]):
    """Mapping from name to part: built-in rows first, then rows of other packages.

    Args:
        group: entry point group, such as "megatron_mtp.losses".
        own: built-in rows, in the order of lists and help texts; `Imported` if they are slow to import.

    Raises:
        ValueError: on look-up or listing, if a package registers a name twice, registers a built-in name, or cannot be
            imported.
    """

    def __init__(self, group: str, own: Mapping[str, T]) -> None:
        self.group, self._own = group, own

    def names(self) -> list[str]:
        """Return all names without importing the parts, for fast help texts."""
        others = (point.name for point in _points(self.group))
        return list(dict.fromkeys((*self._own, *others)))

    def __getitem__(self, name: str) -> T:
        return self._own[name] if name in self._own else self._registered[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._registered

    def __len__(self) -> int:
        return len(self._own) + len(self._registered)

    @cached_property
    def _registered(self) -> dict[str, T]:
        rows: dict[str, T] = {}
        for point in _points(self.group):
            if point.name in self._own or point.name in rows:
                raise ValueError(
                    f"'{_package(point)}' registers '{point.name}' in {self.group}; that name is taken, so rename it."
                )
            rows[point.name] = self._load(point)
        return rows

    def _load(self, point: EntryPoint) -> T:
        try:
            part: T = point.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"'{_package(point)}' registers '{point.name}' in {self.group}, but {point.value} cannot be imported "
                f"({error}); fix or uninstall that package."
            ) from error
        return part


def _points(group: str) -> tuple[EntryPoint, ...]:
    """Return entry points of installed packages."""
    return _points_on(tuple(sys.path), group)


@cache
def _points_on(path: tuple[str, ...], group: str) -> tuple[EntryPoint, ...]:
    """Return entry points of packages on a path; cached, because every package has a file to read."""
    points, own = [*entry_points(group=group)], _of_checkout()
    if own is not None:
        points = [*own.get(group, ()), *(point for point in points if _package(point) != NAME)]
    return tuple(point for point in points if _is_there(point.module))


def _of_checkout() -> dict[str, list[EntryPoint]] | None:
    """Return entry points of a source checkout, which need not be (re)installed; None for a wheel."""
    project = Path(sys.modules["megatron_mtp"].__path__[0]).parent / "pyproject.toml"
    if not project.is_file():
        return None
    found = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
    if found.get("name") != NAME:
        return None
    groups: dict[str, dict[str, str]] = found["entry-points"]
    return {group: [EntryPoint(name, value, group) for name, value in rows.items()] for group, rows in groups.items()}


def _is_there(module: str) -> bool:
    """Return False for an extension of this project whose file is missing; other packages fail at their import."""
    if not module.startswith(EXTENSIONS):
        return True
    files = (Path(folder, *module.split(".")[1:]) for folder in sys.modules["megatron_mtp"].__path__)
    return any(one.with_suffix(".py").is_file() or (one / "__init__.py").is_file() for one in files)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


class Imported[T](Mapping[str, T]):
    """Mapping from name to a part given as an entry point "module:attribute", imported on look-up."""

    def __init__(self, rows: dict[str, str]) -> None:
        self.rows, self._parts = rows, dict[str, T]()

    def __getitem__(self, name: str) -> T:
        if name not in self._parts:
            self._parts[name] = self._loaded(name)
        return self._parts[name]

    def _loaded(self, name: str) -> T:
        part: T = EntryPoint(name, self.rows[name], "").load()
        return part

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
