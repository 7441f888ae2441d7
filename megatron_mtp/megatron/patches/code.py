"""What probes ask of a function's code."""

import inspect
from types import CodeType, FunctionType
from typing import Any, cast

from megatron_mtp.megatron.patches.patch import Function


def names_in(function: Function) -> set[str]:
    """Return the names and strings in the code of a function and of functions inside it."""
    waiting, names = [cast(FunctionType, inspect.unwrap(function)).__code__], set[str]()
    while waiting:
        code = waiting.pop()
        names |= {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def with_globals(function: Function, **changed: Any) -> Function:
    """Return a copy of the function with some global names rebound."""
    plain = cast(FunctionType, inspect.unwrap(function))
    made = FunctionType(plain.__code__, {**plain.__globals__, **changed}, plain.__name__, plain.__defaults__)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made
