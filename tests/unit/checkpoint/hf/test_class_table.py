"""Support for transformers' causal classes: the table of docs/reference/families.md, recounted."""

import runpy
from collections import Counter
from importlib.metadata import version

import pytest
from documents import ROOT
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TABLES = runpy.run_path(str(ROOT / "tools/docs/family_tables.py"))


def classes() -> dict[str, list[str]]:
    """Return the causal classes with their `model_type`s; encoders with a head have other names."""
    found: dict[str, list[str]] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            if name.endswith("ForCausalLM"):
                found.setdefault(name, []).append(model_type)
    return found


@pytest.mark.skipif(
    f"transformers=={version('transformers')}\n" not in (ROOT / "constraints.txt").read_text(),
    reason="the page counts the classes of the transformers in constraints.txt; install that one",
)
def test_the_table_of_the_page_counts_the_installed_classes(capsys: pytest.CaptureFixture[str]) -> None:
    table = TABLES["classes_table"](classes())
    with capsys.disabled():
        print(f"\n{table}")
    assert f"\n{table}\n" in (ROOT / "docs/reference/families.md").read_text(encoding="utf-8")


def test_the_number_of_convertible_classes_does_not_fall() -> None:
    standing = TABLES["standing"]
    counts = Counter("refused" if all(standing(t) == "refused" for t in types) else "" for types in classes().values())
    assert counts[""] >= 44
