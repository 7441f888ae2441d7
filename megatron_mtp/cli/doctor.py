"""`megatron-mtp doctor`: check this machine for missing components, what each one costs, and whether training can run.

Only checks that training needs decide the exit status. Replaced Megatron functions are listed too.
"""

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import textwrap
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_mtp.cli.verbs import Verb
from megatron_mtp.common.errors import Parser, sentences
from megatron_mtp.megatron.machine import why_no_launcher, why_not
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.spec.registry import Registry

DISTRIBUTION = "megatron-mtp"
FITS = "supported is"
"""Text for a package with a supported version."""

EXTRAS = {
    "serve": "the server of OpenAI's HTTP API",
    "quantized": "transformers loads folders of compressed-tensors with it",
    "report": "the page of a run",
    "muon": "--optimizer muon",
    "energy": "joules a token",
}
"""Extras of pyproject.toml and their purpose; Transformer Engine has its own line."""

KNOWN, UNKNOWN = "known version", "unknown version"
"""States of a patch, judged only by the installed version."""

EXAMINATIONS: Registry[Verb] = Registry("megatron_mtp.examinations", {})
"""Checks of extensions and other packages. Each is a flag whose `main` runs instead of the built-in checks; its only
argument is --json.
"""

EXAMPLES = """examples:
  megatron-mtp doctor            # for people
  megatron-mtp doctor --json     # one object: {"can_train": ..., "checks": [...], "patches": [...]}
  megatron-mtp doctor --patches  # every patched function of Megatron and torch, with the reason
  megatron-mtp doctor --probe    # the same, testing the functions instead of the versions (imports Megatron)

exit status: 0 if training can run here (on the CPU counts), 1 if not.
"""


@dataclass(frozen=True)
class Component:
    """A row of the report.

    Attributes:
        found: version or name; None if missing.
        ok: whether it is present in a supported version.
        needed: whether training requires it.
        says: what is supported, or what its absence costs.
    """

    name: str
    found: str | None
    ok: bool
    needed: bool
    says: str


def main(arguments: list[str], program: str) -> int:
    """Print the checks. Exit status 0 if training can run on this machine, 1 if not."""
    with sentences(program):
        args = parser(program).parse_args(arguments)
    if args.examination is not None:
        status: int = import_module(args.examination.module).main(["--json"] if args.json else [], program)
        return status
    checks = [check for part in CHECKS for check in part()]
    patches = patch_rows(args.probe)
    checks += check_patches(patches)
    can_train = all(check.ok for check in checks if check.needed)
    if args.json:
        print(json.dumps({"can_train": can_train, "checks": list(map(asdict, checks)), "patches": patches}))
    else:
        print(text_of(checks, patches if args.patches or args.probe else [], can_train))
    return 0 if can_train else 1


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="Check this machine for missing or slow components, and whether training can run.",
        epilog=EXAMPLES,
    )
    made.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    made.add_argument(
        "--patches", action="store_true", help="list the functions of Megatron and torch that are patched"
    )
    made.add_argument(
        "--probe", action="store_true", help="like --patches, but test each function instead of its version"
    )
    made.set_defaults(examination=None)
    for name, examination in EXAMINATIONS.items():
        made.add_argument(
            f"--{name}", action="store_const", const=examination, dest="examination", help=examination.line
        )
    return made


def text_of(checks: list[Component], patches: list[dict[str, str]], can_train: bool) -> str:
    """Format one line for all packages that fit, one for every other check, three for every patch, and the verdict."""
    fitting = [check for check in checks if check.ok and check.says.startswith(FITS)]
    signs = {check: "ok  " if check.ok else "FAIL" if check.needed else "-   " for check in checks}
    width = max(len(check.name) for check in checks)
    packages = ", ".join(f"{check.name} {check.found}" for check in fitting)
    lines = textwrap.wrap(f"ok   {'packages':<{width}}  {packages}", 120, subsequent_indent=" " * (width + 7))
    others = [check for check in checks if check not in fitting]
    lines += [f"{signs[c]} {c.name:<{width}}  {c.found or 'not found'}: {c.says}" for c in others]
    for row in patches:
        lines += ["", "{target}: {state}\n  {reason} Versions: {versions}; upstream: {upstream}.".format_map(row)]
    missing = ", ".join(check.name for check in checks if check.needed and not check.ok)
    verdict = "training can run here" if can_train else f"training cannot run here; missing: {missing}"
    return "\n".join([*lines, "", verdict])


def check_versions() -> list[Component]:
    """Check Python and every required package against the version ranges of pyproject.toml."""
    try:
        about = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return [Component(DISTRIBUTION, None, False, True, "install it with `pip install -e .` in its folder")]
    required = [Requirement(line) for line in about.get_all("Requires-Dist") or []]
    rows: list[tuple[str, str | None, SpecifierSet]] = [
        ("Python", platform.python_version(), SpecifierSet(about["Requires-Python"]))
    ]
    rows += [(one.name, _installed(one.name), one.specifier) for one in required if one.marker is None]
    checks = []
    for name, found, supported in rows:
        fits = found is not None and supported.contains(found, prereleases=True)
        says = f"{FITS} {supported}" if supported else f"{FITS} any version"
        checks.append(Component(name, found, fits, needed=True, says=says))
    return checks


def check_extras() -> list[Component]:
    """Check what each extra of pyproject.toml installs, and what is missing."""
    checks = []
    for extra, gives in EXTRAS.items():
        lines = importlib.metadata.requires(DISTRIBUTION) or [] if _installed(DISTRIBUTION) else []
        names = [one.name for line in lines if (one := Requirement(line)).marker and f'"{extra}"' in str(one.marker)]
        found = {name: _installed(name) for name in names}
        is_whole = bool(found) and all(found.values())
        there = ", ".join(f"{name} {version}" for name, version in found.items()) if is_whole else None
        says = gives if is_whole else f"{gives}; pip install megatron-mtp[{extra}]"
        checks.append(Component(f"extra {extra}", there, is_whole, False, says))
    return checks


def check_machine() -> list[Component]:
    """Report cores, memory and disk of this machine."""
    import psutil

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    return [
        Component("cores", f"{cores}", True, False, "that this process may use"),
        Component("memory", f"{memory.available / 2**30:.0f} GiB", True, False, f"free of {memory.total / 2**30:.0f}"),
        Component("disk", f"{disk.free / 2**30:.0f} GiB", True, False, f"free of {disk.total / 2**30:.0f}, here"),
    ]


def _installed(name: str) -> str | None:
    if name == "megatron-core":
        from megatron_mtp.megatron.patches.patch import installed

        return version if (version := installed(name)) != "0" else None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_device() -> list[Component]:
    """Report the CUDA device and the communication libraries."""
    torch = _torch()
    if torch is None:
        return []
    on_cuda = torch.cuda.is_available()
    named, memory = None, "training runs on the CPU over gloo, with small models only"
    if on_cuda:
        device = torch.cuda.get_device_properties(0)
        named = f"{torch.cuda.device_count()} x {device.name}"
        memory = f"{device.total_memory / 2**30:.0f} GiB of memory each, CUDA {torch.version.cuda}"
    nccl, gloo = torch.distributed.is_nccl_available(), torch.distributed.is_gloo_available()
    return [
        Component("CUDA device", named, on_cuda, False, memory),
        Component("NCCL", "in torch" if nccl else None, nccl, on_cuda, "processes on CUDA devices communicate over it"),
        Component("gloo", "in torch" if gloo else None, gloo, not on_cuda, "processes on CPUs communicate over it"),
    ]


def _torch() -> ModuleType | None:
    with suppress(ImportError, OSError):  # a shared library that torch needs may be missing
        import torch

        return torch
    return None


def check_kernels() -> list[Component]:
    """Report libraries that make training faster."""
    found, torch = _installed("transformer-engine"), _torch()
    costs = "Megatron's own modules and plain attention take its place: slower on a CUDA device, and no FP8"
    broken = None if found is None or torch is None else why_not("transformer_engine.pytorch")
    is_whole = found is not None and torch is not None and broken is None
    if is_whole and torch is not None:
        unused = "it can be imported; without a CUDA device Megatron's own modules are used"
        costs = "fused layers" if torch.cuda.is_available() else unused
    engine = Component("Transformer Engine", found, is_whole, False, f"{broken}; {costs}" if broken else costs)
    triton, compiler = _installed("triton"), shutil.which("g++")
    why = "it is not installed" if triton is None else why_no_launcher()
    says = "the losses' kernels" if why is None else f"{why}; losses on a CUDA device are slower and take more memory"
    return [
        engine,
        _apex(),
        Component("Triton", triton, why is None, False, says),
        Component("g++", compiler, compiler is not None, False, "torch.compile builds a CUDA device's kernels with it"),
    ]


def _apex() -> Component:
    """Check NVIDIA's Apex, which has fused optimizers; another project has the same name."""
    spec = importlib.util.find_spec("apex")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if any((Path(place) / "optimizers").is_dir() for place in places):
        return Component("Apex", _installed("apex") or "built here", True, False, "fused optimizers")
    costs = (
        "without Transformer Engine as well, torch's Adam takes the place of the fused one, and gradients are not "
        "accumulated in the matrix products; with it, those of the output layer alone are not"
    )
    if spec is not None:
        costs = f"the installed package of that name is another project (NVIDIA's is built from its source); {costs}"
    return Component("Apex", None, False, False, costs)


def patch_rows(probe: bool) -> list[dict[str, str]]:
    """Return the table of `patches/table.py` with the state of each row; empty if torch or Megatron is missing.

    Args:
        probe: whether to test the installed functions, which imports Megatron, or only compare versions.
    """
    if _torch() is None or _installed("megatron-core") is None:
        return []
    from megatron_mtp.megatron.patches.loop import LOOP
    from megatron_mtp.megatron.patches.patch import is_known, state_of
    from megatron_mtp.megatron.patches.table import PATCHES

    if probe:
        with redirect_stdout(StringIO()), warnings.catch_warnings(), suppress(RuntimeError):  # from a missing function
            warnings.simplefilter("ignore")
            prepare()
    rows = []
    for patch in (*PATCHES, *LOOP):
        row = {name: getattr(patch, name) for name in ("target", "reason", "upstream")}
        row["versions"] = f"{patch.package} {patch.versions}"
        guess = KNOWN if is_known(patch) else f"{UNKNOWN} (--probe tests whether it has the fault)"
        rows.append({**row, "state": state_of(patch).value if probe else guess})
    return rows


def check_patches(rows: list[dict[str, str]]) -> list[Component]:
    """Return whether every row is known to be right for the installed versions."""
    states = [row["state"].partition(" (")[0] for row in rows]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    ok = set(states) <= {KNOWN, "applied", "not needed"}
    says = "functions of Megatron and torch that are replaced"
    return [Component("patches", counted, ok, "missing" in states, says)] if rows else []


CHECKS: tuple[Callable[[], list[Component]], ...] = (
    check_versions, check_extras, check_machine, check_device, check_kernels
)  # fmt: skip
