"""No function only hands its arguments on to another one of its file; the caller can call that one.

`def both(a, b): return inner(a, b)` is one, and so is a method that does so with a method of its class. A property, a
dunder and an override have a caller that knows them alone; so has a default that other classes override.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_mtp"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def hand_ons(source: str, overridden: Iterable[str] = ()) -> list[str]:
    """Names of the functions of a file that only hand on, but for defaults of these names."""
    tree = ast.parse(source)
    methods = {one: of for of in ast.walk(tree) if isinstance(of, ast.ClassDef) for one in of.body}
    names = {one.name for one in ast.walk(tree) if isinstance(one, FUNCTION) and one not in methods}
    found = []
    for one in ast.walk(tree):
        if not isinstance(one, FUNCTION) or one.name in overridden or one.name.startswith("__"):
            continue
        if {"property", "override"} & set(decorators(one)):
            continue
        own = methods.get(one)
        targets = (
            names if own is None else names | {f"self.{each.name}" for each in own.body if isinstance(each, FUNCTION)}
        )
        if called(one, is_method=own is not None) in targets:
            found.append(one.name)
    return found


def called(function: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> str | None:
    """The function that the whole body calls with the function's own parameters, each once; None otherwise."""
    body = function.body[ast.get_docstring(function) is not None :]
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return | ast.Expr) else None
    call = call.value if isinstance(call, ast.Await) else call
    if not isinstance(call, ast.Call):
        return None
    listed = function.args
    parameters = [*listed.posonlyargs, *listed.args, *listed.kwonlyargs, listed.vararg, listed.kwarg]
    names = [one.arg for one in parameters if one is not None][
        is_method and "staticmethod" not in decorators(function) :
    ]
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    written = [ast.unparse(one).removeprefix("*") for one in given]
    return ast.unparse(call.func) if sorted(written) == sorted(names) else None


def decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(one) for one in function.decorator_list]


def overridden(sources: Iterable[str]) -> set[str]:
    """Names of the methods that say that they override."""
    functions = (one for source in sources for one in ast.walk(ast.parse(source)) if isinstance(one, FUNCTION))
    return {one.name for one in functions if "override" in decorators(one)}


def test_no_function_only_hands_on() -> None:
    sources = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    assert len(sources) > 150
    defaults = overridden(sources.values())
    found = {file: hand_ons(source, defaults) for file, source in sources.items()}
    assert {file: names for file, names in found.items() if names} == {}


INNER = "def inner(a, b=1, *c, **d):\n    return a\n"


@pytest.mark.parametrize(
    "planted",
    [
        "def planted(a, b):\n    return inner(a, b)",
        'def planted(a, b):\n    """Documented."""\n    inner(a, b=b)',
        "async def planted(a, *c, **d):\n    return await inner(a, *c, **d)",
        "class A:\n    def planted(self, a):\n        return inner(a)",
        "class A:\n    def planted(self, a):\n        return self.other(a)\n    def other(self, a):\n        return a",
        "class A:\n    @staticmethod\n    def planted(a):\n        return inner(a)",
        "def outer():\n    def planted(a):\n        return inner(a)\n    return planted",
    ],
)
def test_the_check_sees_a_planted_function(planted: str) -> None:
    assert hand_ons(f"{INNER}{planted}\n") == ["planted"]


@pytest.mark.parametrize(
    "other",
    [
        "def adds(a):\n    return inner(a, 2)",
        "def chooses(a, b):\n    return inner(b)",
        "def changes(a):\n    return inner(-a)",
        "def elsewhere(a):\n    return len(a)",
        "class A:\n    @property\n    def b(self):\n        return self.c()\n    def c(self):\n        return 1",
        "class A:\n    @override\n    def known(self, a):\n        return inner(a)",
        "class A:\n    def default(self, a):\n        return inner(a)",
    ],
)
def test_the_check_passes_over_what_does_more(other: str) -> None:
    assert hand_ons(f"{INNER}{other}\n", {"default"}) == []
