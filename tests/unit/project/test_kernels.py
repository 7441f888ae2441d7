"""Fused kernel libraries are used if they can be imported, whatever is installed."""

import sys
from pathlib import Path

import pytest

from megatron_mtp.cli import doctor
from megatron_mtp.megatron.machine import transformer_engine_works, why_not


def test_why_not_explains_an_import_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_module.py").write_text("raise OSError('wrong driver')")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_not("json") is None
    assert why_not("no_such_module") == "it is not installed"
    assert why_not("half_a_module") == "it cannot be imported: OSError: wrong driver"


def test_a_transformer_engine_of_another_build_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('libcublas.so.13 is not there')")
    monkeypatch.syspath_prepend(tmp_path)
    for loaded in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(doctor, "_installed", lambda _: "2.11")
    why_not.cache_clear()
    assert not transformer_engine_works()
    check = doctor.check_kernels()[0]
    assert (check.found, check.ok) == ("2.11", False)
    assert "it cannot be imported: OSError: libcublas.so.13 is not there" in check.says
    why_not.cache_clear()
