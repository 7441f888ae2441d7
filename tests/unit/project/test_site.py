"""The site of scripts/docs.sh: it has every page and module, and loads nothing from a network."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT

PACKAGE = ROOT / "megatron_mtp"
ELSEWHERE = {"CONTRIBUTING.md": "develop/contributing"}
"""Pages outside of docs/, and their place on the site; README.md has none."""

LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(https?:)?//""")
"""Elements that make a browser fetch something."""


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w/]+\.md)$", navigation, re.MULTILINE)
    pages = [name.removeprefix("docs/") for name in DOCUMENTS if name.startswith("docs/")]
    assert sorted(set(pages) - set(listed)) == []
    assert len(listed) == len(set(listed))


@pytest.mark.matrix
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed; pip install -e '.[docs]'"
)
def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    """mkdocs fails on a broken link or anchor, which test_documents.py also checks."""
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(["bash", ROOT / "scripts/docs.sh", tmp_path], env=environment, check=True, capture_output=True)
    written = {str(path.relative_to(tmp_path).with_suffix("")): path for path in tmp_path.rglob("*.html")}
    pages = {ELSEWHERE.get(name, name.removeprefix("docs/").removesuffix(".md")) for name in DOCUMENTS} - {"README"}
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")]
    modules = {name.removesuffix(".__init__") for name in names}
    public = {f"reference/api/{name}" for name in modules if "._" not in name}
    assert sorted((pages | public) - written.keys()) == []
    texts = {name: path.read_text(encoding="utf-8") for name, path in written.items()}
    assert [name for name, text in texts.items() if LOADED.search(text)] == []
    assert 'id="megatron_mtp.decoding.engine.generate"' in texts["reference/api/megatron_mtp.decoding.engine"]
    index = json.loads((tmp_path / "search/search_index.json").read_text(encoding="utf-8"))
    assert "troubleshooting.html" in {entry["location"] for entry in index["docs"]}


@pytest.mark.parametrize(
    ("line", "loaded"),
    [
        ('<script src="https://example.org/x.js">', True),
        ("<link rel=stylesheet href=//example.org/x.css>", True),
        ('<a href="https://example.org">', False),
        ('<script src="../assets/x.js">', False),
    ],
)
def test_resources_loaded_from_a_network_are_detected(line: str, loaded: bool) -> None:
    assert bool(LOADED.search(line)) == loaded
