"""Rows of the patch table, and how they are applied.

    Patch(target, reason, upstream, versions, probe, replacement)
      probe(original) -> True     the bug is present           the replacement is installed
                         False    the bug is fixed             Megatron's own stays
                         None     the probe cannot tell        a known version: as for True
                                                               another version: as for True, with a warning

Originals are kept when they are replaced, so probes always see Megatron's own function. Several rows may have the same
target: each replacement wraps the previous one.
"""

import importlib
import importlib.metadata
import importlib.util
import runpy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

CORE = ">=0.19.0,<=0.19.2"
"""Releases of megatron-core whose source the rows know."""
ISSUES = "https://github.com/NVIDIA/Megatron-LM/issues"
PULLS = "https://github.com/NVIDIA/Megatron-LM/pull"
NONE = "none known"

Function = Callable[..., Any]
Probe = Callable[[Any], bool | None]
"""Function from the original to whether the fault is present; None, or an exception, if it does not know this version
of the function. A probe leaves no trace in the process. Most probes call the function with a few numbers; if that would
need a job, they read its compiled code.
"""
Replace = Callable[[Any], Any]
"""Function from the current function to its replacement."""


class State(Enum):
    """State of a row on this machine."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed (the installed version does not have the fault)"
    UNKNOWN = "unknown version (applied; the probe cannot tell whether the fault is there)"
    MISSING = "missing (the installed version has no such function)"


@dataclass(frozen=True)
class Patch:
    """A fix for a bug of the published megatron-core: a row of `PATCHES`.

    Attributes:
        target: module and attribute, separated by a colon: `megatron.core.optimizer:DistributedOptimizer`.
        reason: what goes wrong without it.
        upstream: the issue or pull request, or "none known".
        versions: versions of `package` that are known to have the bug, as a version specifier.
        probe: function from the original to whether the bug is present; None or an exception if it cannot tell.
        replacement: the fixed function; None if each training run creates its own (`while_replaced`).
        package: the distribution that the target belongs to.
    """

    target: str
    reason: str
    upstream: str
    versions: str
    probe: Probe
    replacement: Replace | None = None
    package: str = "megatron-core"

    @property
    def name(self) -> str:
        """Name of the attribute."""
        return self.target.partition(":")[2]

    def owner(self) -> Any:
        """Module or class that has the attribute."""
        module, _, path = self.target.partition(":")
        owner = importlib.import_module(module)
        for part in path.split(".")[:-1]:
            owner = getattr(owner, part)
        return owner


_REPLACED: dict[int, tuple[Any, Any]] = {}
"""Every replacement in this process, by its id, with the original, which later probes need."""

_ABSENT = object()


def original_of(patch: Patch) -> Any:
    """Return the target as it was before this process replaced it; `_ABSENT` if it does not exist."""
    try:
        found = getattr(patch.owner(), patch.name.rpartition(".")[2])
    except (ImportError, AttributeError):
        return _ABSENT
    return _REPLACED.get(id(found), (found, found))[1]


def state_of(patch: Patch) -> State:
    """Run the probe, once for each original. Replaces nothing."""
    original = original_of(patch)
    if original is _ABSENT:
        return State.MISSING
    is_faulty = _answer(patch.probe, original)
    if is_faulty is None and not is_known(patch):
        return State.UNKNOWN
    return State.NOT_NEEDED if is_faulty is False else State.APPLIED


@cache
def _answer(probe: Probe, original: Any) -> bool | None:
    """Run the probe on the function, uncompiled: Megatron decorates many functions with `torch.compile`.

    Compiling would take minutes in every process and start CUDA before a rank has chosen its device.
    """
    try:
        with torch.compiler.set_stance("force_eager"):
            return probe(original)
    except Exception:  # the probe does not know this version of the function
        return None


def is_known(patch: Patch) -> bool:
    """Return whether the installed version is known to have the bug. Imports nothing."""
    return installed(patch.package) in SpecifierSet(patch.versions, prereleases=True)


@cache
def installed(package: str) -> str:
    """Return the imported version of a package, or 0. A checkout of Megatron takes precedence over the distribution."""
    if package == "megatron-core" and (spec := importlib.util.find_spec("megatron.core")) and spec.origin:
        about = Path(spec.origin).with_name("package_info.py")  # run directly: importing the package takes seconds
        version: str = runpy.run_path(str(about))["__version__"]
        return version.partition("+")[0]  # the suffix is the commit of whatever repository encloses the file
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def apply(patches: Sequence[Patch]) -> None:
    """Replace the targets whose bug is present. A second call changes nothing.

    Raises:
        RuntimeError: the installed version has no such function.
    """
    for _, rows in groupby(patches, key=lambda patch: patch.target):
        _apply([row for row in rows if row.replacement is not None])


def _apply(rows: list[Patch]) -> None:
    """Apply the rows of one target."""
    if not rows:
        return
    original = replacement = original_of(rows[0])
    for row in rows:
        state = state_of(row)
        if state is State.MISSING:
            raise RuntimeError(_sentence(row, "has no such function; install a version that is supported."))
        if state is State.UNKNOWN:
            warnings.warn(_sentence(row, "was not tried with this package; the patch is applied."), stacklevel=2)
        if state is not State.NOT_NEEDED and row.replacement is not None:
            replacement = row.replacement(replacement)
    setattr(rows[0].owner(), rows[0].name.rpartition(".")[2], replacement)
    if replacement is not original:
        _REPLACED[id(replacement)] = replacement, original


def _sentence(patch: Patch, ending: str) -> str:
    """Return a sentence on the installed version and the known versions."""
    version = installed(patch.package)
    return f"{patch.target} is patched in {patch.package} {patch.versions}, and the installed {version} {ending}"


@contextmanager
def while_replaced(patches: Sequence[Patch], replacements: dict[str, Replace]) -> Iterator[None]:
    """Within this context, replace targets by the results of their replacements, by name.

    Rows whose probe finds no bug are left alone.

    Raises:
        KeyError: a name has no row.
    """
    rows = {patch.name: patch for patch in patches}
    chosen = [rows[name] for name in replacements]
    needed = [row for row in chosen if state_of(row) in (State.APPLIED, State.UNKNOWN)]
    before = [(row.owner(), row.name, getattr(row.owner(), row.name)) for row in needed]
    for owner, name, found in before:
        setattr(owner, name, replacements[name](found))
    try:
        yield
    finally:
        for owner, name, found in before:
            setattr(owner, name, found)
