"""API pages: every public name of the package has a docstring."""

import ast

from documents import ROOT

PACKAGE = ROOT / "megatron_mtp"
WITHOUT = {"megatron/cpu.py"}
"""Stand-ins for torch functions, documented by torch; the table in cpu.py has the reasons."""


def undocumented(source: str) -> list[str]:
    """Return public classes and functions of a module without a docstring, and the module itself."""
    module = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in module.body if isinstance(node, kinds) and not node.name.startswith("_")]
    names = [node.name for node in public if ast.get_docstring(node) is None]
    return names if ast.get_docstring(module) else ["the module", *names]


def test_public_names_have_docstrings() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    found = {
        name: undocumented(path.read_text(encoding="utf-8")) for name, path in files.items() if name not in WITHOUT
    }
    assert {name: names for name, names in found.items() if names} == {}
    assert undocumented("def f(): pass\nclass _A: pass\nclass B:\n    'doc'") == ["the module", "f"]
