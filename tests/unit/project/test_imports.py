"""Which subpackage may import which: read from the source, so that nothing needs to be imported."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megatron_mtp

PACKAGE = Path(megatron_mtp.__file__).parent
LOW = {"common", "megatron", "megatron/checkpoint", "megatron/patches", "spec"}
CHECKPOINT = {f"checkpoint/{room}" for room in ("hf", "families", "model", "convert", "verify", "audit")}
ALLOWED: dict[str, set[str]] = {
    "common": set(),
    "spec": set(),
    "megatron/checkpoint": {"common"},
    "megatron/patches": {"megatron/checkpoint"},
    "megatron": {"spec", "megatron/patches"},
    "data": LOW,
    "model": LOW | {"data"},
    "losses": {"spec", "megatron", "data", "model"},
    "checkpoint/hf": LOW | {"data"},
    "checkpoint/model": LOW | {"model"},
    "checkpoint/families": LOW | {"checkpoint/hf"},
    "checkpoint/convert": LOW | {"data", "model", "checkpoint/hf", "checkpoint/model", "checkpoint/families"},
    "checkpoint/verify": LOW | {"data", "model"} | CHECKPOINT - {"checkpoint/audit"},
    "checkpoint/audit": LOW | {"data", "model"} | CHECKPOINT,
    "checkpoint": LOW | {"model"} | CHECKPOINT,
    "decoding": LOW | {"data", "model", "losses", "checkpoint/convert", "checkpoint/model"},  # weight updates
    "heads": LOW | {"data", "model", "decoding"} | CHECKPOINT - {"checkpoint/model", "checkpoint/audit"},
    "training": LOW | {"data", "model", "losses"},
    "attach": {"spec", "megatron/patches", "data", "model", "losses"},
    "server": {"common", "megatron", "data", "decoding"},
    "cli": LOW | {"data", "losses", "checkpoint", "decoding", "training", "server"} | CHECKPOINT,
    "__main__": {"cli"},
    "extensions": set(),
    "extensions/cpu_rows": {"common", "model", "decoding"},
    "extensions/kernels": {"cli", "common", "spec", "losses", "model", "megatron"},
    "extensions/plan": {
        "cli",
        "common",
        "spec",
        "megatron",
        "model",
        "checkpoint/hf",
        "checkpoint/families",
        "training",
    },
    "extensions/predict": LOW | {"cli", "data", "model", "decoding"} | CHECKPOINT,
    "extensions/prove": {"cli", "common", "model", "megatron", "attach"},
    "extensions/report": {"cli", "common", "training"},
}
"""Subpackages that each subpackage's files may import from."""

WITHOUT_MEGATRON = [
    "spec/config.py",
    "spec/attention.py",
    "spec/kinds.py",
    "spec/rope_scaling.py",
    "data/batch.py",
    "losses/acceptance.py",
    "losses/head_objective.py",
    "losses/objective.py",
    "decoding/config.py",
    "decoding/draft.py",
    "decoding/requests.py",
    "decoding/sampling.py",
    "decoding/verifiers.py",
]
"""Plain torch: can be read and used without knowing Megatron."""


MOST_IMPORTED = {
    "losses.linear_cross_entropy": (11, 1_800),
    "losses.objective": (16, 2_500),
    "attach": (29, 5_350),
    "training.forward_step": (27, 4_650),
    "training.run": (66, 11_000),
    "checkpoint.convert.import_hf": (51, 7_800),
    "decoding.engine": (49, 8_600),
    "server.async_engine": (30, 4_850),
}
"""How many files of the package, and lines, each module's import may load. Lower a number when it falls."""


def imported_modules(source: str, package: str) -> list[str]:
    """Return dotted names imported anywhere in the source, even in functions; `package` resolves relative imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def wrong_imports(file: str, source: str) -> list[str]:
    """Return imports of our own subpackages that the file, named by its path in the package, must not have."""
    parts = Path(file).with_suffix("").parts
    package = ".".join(("megatron_mtp", *parts[:-1]))
    room = room_of(parts)

    def is_wrong(name: str) -> bool:
        top, *rest = name.split(".")
        if top == "megatron_mtp":
            return room_of(rest) not in ALLOWED[room] | {room, "__version__"}
        return top == "megatron" and file in WITHOUT_MEGATRON

    return [name for name in imported_modules(source, package) if is_wrong(name)]


def room_of(parts: Sequence[str]) -> str:
    """Return a module's subpackage, from the parts of its name."""
    inner = "/".join(parts[:2])
    return inner if inner in ALLOWED else parts[0]


def files() -> list[str]:
    paths = (str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in paths if path != "__init__.py")


@pytest.mark.parametrize("file", files())
def test_a_file_imports_only_from_rooms_below_it(file: str) -> None:
    assert wrong_imports(file, (PACKAGE / file).read_text(encoding="utf-8")) == []


def test_the_table_has_every_room_and_no_other() -> None:
    """A new subpackage must list the subpackages below it here."""
    assert ALLOWED.keys() == {room_of(Path(file).with_suffix("").parts) for file in files()}


def test_subpackage_imports_have_no_cycle() -> None:
    """No two subpackages may import each other, directly or indirectly."""
    TopologicalSorter({room: below - {room} for room, below in ALLOWED.items()}).prepare()


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, including in functions and for type checkers.

    Args:
        sources: source by the file's path in the package.
    """
    parts = {file: Path(file).with_suffix("").parts for file in sources}
    modules = {".".join(("megatron_mtp", *(one for one in names if one != "__init__"))) for names in parts.values()}
    graph: dict[str, set[str]] = {}
    for file, source in sources.items():
        *folders, name = parts[file]
        package = ".".join(("megatron_mtp", *folders))
        module = package if name == "__init__" else f"{package}.{name}"
        found = imported_modules(source, package)
        named = {one if one in modules else one.rpartition(".")[0] for one in found}
        graph[module] = named & modules - {module}
    return graph


def circle_among(sources: dict[str, str]) -> list[str]:
    """Return modules that import each other in a cycle; empty if there is none."""
    try:
        TopologicalSorter(graph_of(sources)).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle_among({file: (PACKAGE / file).read_text(encoding="utf-8") for file in files()}) == []


@pytest.mark.parametrize(
    "back",
    [
        "from megatron_mtp.data.a import x",
        "from megatron_mtp.data import a",
        "from . import a",
        "def f():\n    import megatron_mtp.data.a",
        "if TYPE_CHECKING:\n    from megatron_mtp.data.a import x",
    ],
)
def test_the_check_sees_a_planted_circle(back: str) -> None:
    sources = {"data/a.py": "from megatron_mtp.data.b import y", "data/b.py": "import torch", "data/c.py": back}
    assert circle_among(sources) == []
    assert set(circle_among({**sources, "data/b.py": back})) == {"megatron_mtp.data.a", "megatron_mtp.data.b"}


class AtImport(ast.NodeTransformer):
    """Keep only what runs when the module is imported."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return ast.Pass()

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else node


@cache
def at_import() -> dict[str, str]:
    """Return every file of the package, without what runs later."""
    sources = {file: (PACKAGE / file).read_text(encoding="utf-8") for file in files()}
    return {file: ast.unparse(AtImport().visit(ast.parse(source))) for file, source in sources.items()}


@cache
def graph_at_import() -> dict[str, set[str]]:
    """Return `graph_of` what runs when the package's files are imported."""
    return graph_of(at_import())


def imported_with(module: str) -> set[str]:
    """Return the package's modules that importing one loads, including itself and its parent packages."""
    graph, found, waiting = graph_at_import(), set[str](), [f"megatron_mtp.{module}"]
    while waiting:
        if (name := waiting.pop()) in graph and name not in found:
            found.add(name)
            waiting += [*graph[name], name.rpartition(".")[0]]
    return found


def lines_of(module: str) -> int:
    """Return the number of lines of a module, by its dotted name."""
    inside = PACKAGE.joinpath(*module.split(".")[1:])
    path = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(("module", "most"), MOST_IMPORTED.items())
def test_an_import_brings_few_files_along(module: str, most: tuple[int, int]) -> None:
    found = imported_with(module)
    sizes = len(found), sum(map(lines_of, found))
    assert sizes[0] <= most[0], f"import {module} brings {sizes[0]} files along: {', '.join(sorted(found))}"
    assert sizes[1] <= most[1], f"import {module} brings {sizes[1]} lines along: {', '.join(sorted(found))}"


def test_attaching_imports_neither_a_trainer_nor_a_builder_nor_patches() -> None:
    """A framework has its own trainer and builder, and Megatron releases without `megatron.training` can attach."""
    at_once, found = at_import(), imported_with("attach")
    assert "megatron_mtp.model.stock" in found
    ours = {
        f"megatron_mtp.{name}" for name in ("megatron.patches", "model.build", "model.trained_stage", "model.arguments")
    }
    assert [name for name in found if any(f"{name}.".startswith(f"{one}.") for one in ours)] == []
    modules = {".".join(("megatron_mtp", *Path(file).with_suffix("").parts)): file for file in at_once}
    imported = [
        one for name in found & modules.keys() for one in imported_modules(at_once[modules[name]], "megatron_mtp")
    ]
    assert [one for one in imported if one.startswith("megatron.training")] == []


def test_extensions_import_the_modules_of_the_core_that_the_design_lists() -> None:
    """All of them, and each for at least one extension."""
    design = (PACKAGE.parent / "docs/explanation/design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`) \|", design.split("## Extensions")[1].split("\n## ")[0], re.M)
    listed = {f"megatron_mtp.{name}." for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    used = {
        f"{name}."
        for file in files()
        if file.startswith("extensions/")
        for name in imported_modules((PACKAGE / file).read_text(encoding="utf-8"), "")
        if name.startswith("megatron_mtp.") and not name.startswith("megatron_mtp.extensions.")
    }
    assert {name for name in used if not name.startswith(tuple(listed))} == set()
    assert {name for name in listed if not any(one.startswith(name) for one in used)} == set()


def test_the_plain_modules_are_where_this_test_looks_for_them() -> None:
    assert set(WITHOUT_MEGATRON) <= set(files())


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("data/batch.py", "from megatron_mtp.model import mtp", ["megatron_mtp.model.mtp"]),
        ("data/batch.py", "from megatron_mtp import model", ["megatron_mtp.model"]),
        ("data/batch.py", "from ..model.mtp import x", ["megatron_mtp.model.mtp.x"]),
        ("data/batch.py", "def f():\n    import megatron_mtp.losses.token_loss", ["megatron_mtp.losses.token_loss"]),
        ("data/batch.py", "from megatron.core import mpu", ["megatron.core.mpu"]),
        ("model/mtp.py", "from megatron_mtp.losses import LOSSES", ["megatron_mtp.losses.LOSSES"]),
        ("decoding/engine.py", "import megatron_mtp.training.run as run", ["megatron_mtp.training.run"]),
        ("checkpoint/a.py", "from megatron_mtp.training.run import main", ["megatron_mtp.training.run.main"]),
        (
            "checkpoint/hf/a.py",
            "from megatron_mtp.checkpoint.convert.plan import x",
            ["megatron_mtp.checkpoint.convert.plan.x"],
        ),
        (
            "checkpoint/convert/a.py",
            "from megatron_mtp.checkpoint.verify import verify",
            ["megatron_mtp.checkpoint.verify.verify"],
        ),
        ("megatron/cpu.py", "from megatron_mtp.data.batch import x", ["megatron_mtp.data.batch.x"]),
        ("model/mtp.py", "from megatron.core import mpu\nfrom . import sharing\nfrom ..data import batch", []),
        ("training/run.py", "from megatron_mtp.megatron.checkpoint.iterations import x", []),
        ("training/run.py", "from megatron_mtp.cli.main import main", ["megatron_mtp.cli.main.main"]),
        ("cli/main.py", "import megatron_mtp.extensions.report", ["megatron_mtp.extensions.report"]),
        ("server/api.py", "from megatron_mtp.extensions import report", ["megatron_mtp.extensions.report"]),
        (
            "extensions/report/page.py",
            "from megatron_mtp.extensions.predict import engines",
            ["megatron_mtp.extensions.predict.engines"],
        ),
        ("extensions/report/a.py", "from megatron_mtp.checkpoint import hf", ["megatron_mtp.checkpoint.hf"]),
    ],
)
def test_the_check_sees_a_planted_import(file: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports(file, source) == wrong
