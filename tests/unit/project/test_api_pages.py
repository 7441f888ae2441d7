"""API pages: every public name has a docstring, and strict type checkers accept imports of the names listed."""

import ast
import re

from documents import ROOT

PACKAGE = ROOT / "megatron_mtp"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
WITHOUT = {"megatron/cpu.py"}
"""Stand-ins for torch functions, documented by torch; the table in cpu.py has the reasons."""


def undocumented(source: str) -> list[str]:
    """Return public classes and functions of a module without a docstring, and the module itself."""
    module = ast.parse(source)
    public = [node for node in module.body if isinstance(node, DEFINITIONS) and not node.name.startswith("_")]
    names = [node.name for node in public if ast.get_docstring(node) is None]
    return names if ast.get_docstring(module) else ["the module", *names]


def test_public_names_have_docstrings() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    found = {
        name: undocumented(path.read_text(encoding="utf-8")) for name, path in files.items() if name not in WITHOUT
    }
    assert {name: names for name, names in found.items() if names} == {}
    assert undocumented("def f(): pass\nclass _A: pass\nclass B:\n    'doc'") == ["the module", "f"]


def exported(source: str) -> set[str]:
    """Return names that a strict type checker lets other modules import: defined there, or listed in `__all__`."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found |= set(ast.literal_eval(node.value))
    return found


def test_the_listed_names_are_exported() -> None:
    """Regression: `Head` of `megatron_mtp.attach` was only imported there, so mypy refused the documented import."""
    missing, count = [], 0
    for row in re.findall(r"^\|.*? \| (.*?) \|", (ROOT / "docs/reference/python_api.md").read_text(), re.MULTILINE):
        room = ""
        for names, module in re.findall(r"((?:`\w+`(?:, )?)+) of `([\w.]+)`", row):
            room, module = (room, f"{room}{module}") if module.startswith(".") else (module.rpartition(".")[0], module)
            path = ROOT / module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            listed = set(re.findall(r"\w+", names))
            missing += [f"{module}.{name}" for name in listed - exported(file.read_text(encoding="utf-8"))]
            count += len(listed)
    assert missing == []
    assert count > 12
    assert exported("from a import B\nfrom c import D\n__all__ = ['D']\ndef f(): ...") == {"D", "f"}
