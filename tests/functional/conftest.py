"""One set of records for all tests of a file."""

import pytest
from records import Records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return Records(tmp_path_factory.mktemp("layouts"))
