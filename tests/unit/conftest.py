"""Makes Megatron runnable on this machine before any test is collected."""

import pytest
from quicker import parse_sources_once

from megatron_mtp.runtime import prepare

prepare()
parse_sources_once()


@pytest.fixture(scope="session")
def megatron() -> None:
    """A process group of one rank with Megatron's parallel state: what building a model needs."""
    from megatron_single import join_world_of_one  # imports Megatron, which comes after prepare()

    join_world_of_one()
