"""Which test cases belong to the first tier."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], first: Container[Any]) -> list[Any]:
    """Return the cases for `parametrize`; those that are not in `first` run only with --all."""
    return [case if case in first else pytest.param(*_values(case), marks=pytest.mark.matrix) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    """Return the values of a case's parameters."""
    return case if isinstance(case, tuple) else (case,)
