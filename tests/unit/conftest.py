"""Make Megatron runnable on this machine before any test is collected."""

import pytest
from on_device import OnDevice
from quicker import parse_sources_once

from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.runtime import prepare

prepare()
if not cpu.installed():
    OnDevice().__enter__()  # for as long as this process runs, module-level tensors included
parse_sources_once()


@pytest.fixture(scope="session", autouse=True)
def _in_a_world_of_one(megatron: None) -> None:
    """Apply the fixture to every test here, whichever ran before."""
