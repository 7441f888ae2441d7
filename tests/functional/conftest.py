"""One set of records for all tests of a file; all tests run in a world of one, as in the other folders."""

from collections.abc import Iterator

import pytest
from records import Records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    made = Records(tmp_path_factory.mktemp("layouts"))
    yield made
    made.end()


@pytest.fixture(scope="session", autouse=True)
def _in_a_world_of_one(megatron: None) -> None:
    """Apply the fixture to every test here, whichever ran before."""
