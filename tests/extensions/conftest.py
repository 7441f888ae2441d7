"""Makes Megatron runnable on this machine before any test is collected, as for the core's unit tests."""

import pytest
from megatron_single import join_world_of_one

from megatron_mtp.runtime import prepare

prepare()


@pytest.fixture(scope="session")
def megatron() -> None:
    """A process group of one rank with Megatron's parallel state: what building a model needs."""
    join_world_of_one()
