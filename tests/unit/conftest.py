"""Makes Megatron runnable on this machine before any test module imports it."""

from megatron_mtp.platform import prepare

prepare()

import pytest  # noqa: E402
from megatron_single import join_world_of_one  # noqa: E402


@pytest.fixture(scope="session")
def megatron() -> None:
    """A process group of one rank with Megatron's parallel state: what building a model needs."""
    join_world_of_one()
