"""An external package adds a row to a table by an entry point, and cannot replace one of ours."""

import sys
from pathlib import Path

import pytest

import megatron_mtp
from megatron_mtp.spec.registry import Imported, Registry


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an installed package without rows."""
    (tmp_path / "outside_parts.py").write_text("focal = 'outside focal'\n", encoding="utf-8")
    (tmp_path / "outside-1.0.dist-info").mkdir()
    (tmp_path / "outside-1.0.dist-info/METADATA").write_text("Name: outside\nVersion: 1.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "outside_parts", raising=False)
    return tmp_path


def register(outside: Path, *rows: str) -> None:
    text = "\n".join(["[megatron_mtp.tested]", *rows])
    (outside / "outside-1.0.dist-info/entry_points.txt").write_text(text + "\n", encoding="utf-8")


def table() -> Registry[str]:
    return Registry("megatron_mtp.tested", {"ce": "our ce"})


def test_rows_of_other_packages_come_after_ours(outside: Path) -> None:
    register(outside, "focal = outside_parts:focal")
    assert dict(table()) == {"ce": "our ce", "focal": "outside focal"}
    assert table()["focal"] == "outside focal"
    assert "focal" in table()
    assert len(table()) == 2


def test_an_unknown_name_is_a_key_error(outside: Path) -> None:
    assert "none" not in table()
    assert table().get("none") is None


def test_our_rows_cannot_be_replaced(outside: Path) -> None:
    register(outside, "ce = outside_parts:focal")
    assert table()["ce"] == "our ce"
    with pytest.raises(ValueError, match=r"'outside' registers 'ce' .*; that name is taken"):
        list(table())


@pytest.mark.parametrize("value", ["outside_parts:none", "no_such_module:focal"])
def test_a_row_that_cannot_be_imported_is_named(outside: Path, value: str) -> None:
    register(outside, f"focal = {value}")
    with pytest.raises(ValueError, match=r"'outside' registers 'focal'.*cannot be imported"):
        list(table())


def test_an_extension_without_its_folder_is_skipped(outside: Path) -> None:
    register(outside, "gone = megatron_mtp.extensions.gone.part:part", "focal = outside_parts:focal")
    assert table().names() == ["ce", "focal"]
    assert dict(table()) == {"ce": "our ce", "focal": "outside focal"}


def test_an_extension_that_lacks_another_package_is_named(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron_mtp/extensions", "megatron_mtp/extensions/lacking"):
        (outside / name).mkdir(parents=True)
        (outside / name / "__init__.py").touch()
    (outside / "megatron_mtp/extensions/lacking/part.py").write_text("import no_such_module\n", encoding="utf-8")
    monkeypatch.setattr(megatron_mtp, "__path__", [str(outside / "megatron_mtp")])
    monkeypatch.setattr(megatron_mtp, "extensions", None, raising=False)  # set by the import below
    for name in [one for one in sys.modules if one.startswith("megatron_mtp.extensions")]:
        monkeypatch.delitem(sys.modules, name)
    register(outside, "lacking = megatron_mtp.extensions.lacking.part:part")
    assert table().names() == ["ce", "lacking"]
    with pytest.raises(ValueError, match=r"registers 'lacking'.*cannot be imported.*no_such_module"):
        list(table())
    for name in [one for one in sys.modules if one.startswith("megatron_mtp.extensions")]:
        del sys.modules[name]


def test_names_are_listed_without_importing_anything(outside: Path) -> None:
    register(outside, "focal = no_such_module:focal", "ce = outside_parts:focal")
    assert table().names() == ["ce", "focal"]


def test_rows_that_are_imported_when_looked_up(outside: Path) -> None:
    rows = {"focal": "outside_parts:focal", "bad": "no_such_module:focal"}
    lazy: Registry[str] = Registry("megatron_mtp.tested", Imported(rows))
    assert lazy.names() == ["focal", "bad"]
    assert len(lazy) == 2
    assert "bad" in Imported(rows)
    assert "none" not in Imported(rows)
    assert "outside_parts" not in sys.modules
    assert lazy["focal"] == "outside focal"
    del sys.modules["outside_parts"].focal
    assert lazy["focal"] == "outside focal", "imported once"
    with pytest.raises(ModuleNotFoundError):
        lazy["bad"]


def test_a_checkout_registers_what_its_pyproject_names_installed_or_not(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a checkout on the path works without installation, and one installed before a change finds new entries."""
    project = '[project]\nname = "megatron-mtp"\n'
    rows = '[project.entry-points."megatron_mtp.tested"]\nfocal = "outside_parts:focal"\n'
    (outside / "pyproject.toml").write_text(project + rows, encoding="utf-8")
    monkeypatch.setattr(megatron_mtp, "__path__", [str(outside / "megatron_mtp")])
    assert dict(table()) == {"ce": "our ce", "focal": "outside focal"}


def test_another_project_around_an_installed_package_registers_nothing(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outside / "pyproject.toml").write_text('[project]\nname = "theirs"\n', encoding="utf-8")
    monkeypatch.setattr(megatron_mtp, "__path__", [str(outside / "megatron_mtp")])
    assert dict(table()) == {"ce": "our ce"}
