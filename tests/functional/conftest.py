"""One set of records for all tests of a file."""

from collections.abc import Iterator

import pytest
from records import Records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    made = Records(tmp_path_factory.mktemp("layouts"))
    yield made
    made.end()
