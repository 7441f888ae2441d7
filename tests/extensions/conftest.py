"""Make Megatron runnable on this machine before any test is collected, as for the core's unit tests."""

import pytest

from megatron_mtp.megatron.runtime import prepare

prepare()


@pytest.fixture(scope="session", autouse=True)
def _in_a_world_of_one(megatron: None) -> None:
    """Apply the fixture to every test here, whichever ran before."""
