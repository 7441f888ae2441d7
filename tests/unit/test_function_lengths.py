"""No function is longer than a screen: 60 lines from `def` to its end, docstring and functions inside it included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 60
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
FOLDERS = ("megatron_mtp", "tools", "benchmarks", "examples", "tests")


def sources() -> list[Path]:
    return [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


def long_functions(source: str) -> list[str]:
    """Names and lengths of the functions in the source that are too long."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTION)]
    lengths = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [f"{name}: {length} lines" for name, length in lengths if length > LONGEST]


def test_no_function_is_longer_than_a_screen() -> None:
    found = {str(path.relative_to(ROOT)): long_functions(path.read_text(encoding="utf-8")) for path in sources()}
    assert len(found) > 200
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(("lines", "found"), [(59, []), (60, ["planted: 61 lines"])])
def test_the_check_sees_a_planted_function(lines: int, found: list[str]) -> None:
    assert long_functions("class Planted:\n    def planted(self):\n" + "        pass\n" * lines) == found
