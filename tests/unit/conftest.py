"""Makes Megatron runnable on this machine before any test is collected; products of float32 are exact in all tests."""

from collections.abc import Iterator

import pytest
from quicker import parse_sources_once

from megatron_mtp.runtime import prepare

prepare()
parse_sources_once()


@pytest.fixture(scope="session", autouse=True)
def _exact_products() -> Iterator[None]:
    """Images of NVIDIA begin with TF32, whose 10 bits are less than the tests' tolerances."""
    from megatron_mtp.checkpoint.verify.prompt import exact_float32

    with exact_float32():
        yield


@pytest.fixture(scope="session")
def megatron() -> None:
    """A process group of one rank with Megatron's parallel state: what building a model needs."""
    from megatron_single import join_world_of_one  # imports Megatron, which comes after prepare()

    join_world_of_one()
