"""old_names.py: an import under the previous release's name returns the renamed module's object, with a warning."""

import subprocess
import sys
from importlib import import_module

import pytest

from megatron_mtp.common.old_names import OLD_NAMES


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_gives_the_same_objects_and_a_warning(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{OLD_NAMES[old]} now"):
        found = import_module(old)
    public = {name: value for name, value in vars(import_module(OLD_NAMES[old])).items() if not name.startswith("__")}
    assert {name: vars(found)[name] for name in public} == public


def test_an_old_name_costs_nothing_until_it_is_imported() -> None:
    code = "import sys, megatron_mtp; print([name for name in sys.modules if name.startswith('megatron_mtp.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['megatron_mtp.common', 'megatron_mtp.common.old_names']"
