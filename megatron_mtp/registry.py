"""Tables by name, to which other installed packages may add rows by an entry point.

    [project.entry-points."megatron_mtp.losses"]     # or .proposers, .verifiers, .families
    focal = "my_package.focal:Focal"

adds a loss `focal` to the table of losses. Packages are asked when a name is looked up that this package does not have,
or when the table is listed; so a name of ours costs nothing and cannot be replaced.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib.metadata import EntryPoint, EntryPoints, entry_points


class Registry[T](Mapping[str, T]):
    """Name to part: our own rows, then those of other packages.

    Args:
        group: the entry points' group, "megatron_mtp.losses".
        own: the rows of this package, in the order of lists and help texts; `Imported` where they are slow to import.

    Raises:
        ValueError: on a look-up or listing, where a package registers a name twice, one of ours, or cannot be imported.
    """

    def __init__(self, group: str, own: Mapping[str, T]) -> None:
        self.group, self._own = group, own

    def names(self) -> list[str]:
        """All names; imports nothing, so that a help text need not wait."""
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
                f"({error}); mend or uninstall that package."
            ) from error
        return part


def _points(group: str) -> EntryPoints:
    """What installed packages register."""
    return _all_points(tuple(sys.path)).select(group=group)


@cache
def _all_points(path: tuple[str, ...]) -> EntryPoints:
    """Of the packages on this path, of which every one has a file to read."""
    return entry_points()


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


class Imported[T](Mapping[str, T]):
    """Name to part, where a part is written as an entry point is, "module:attribute", and imported when looked up."""

    def __init__(self, rows: dict[str, str]) -> None:
        self.rows = rows

    def __getitem__(self, name: str) -> T:
        part: T = EntryPoint(name, self.rows[name], "").load()
        return part

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
