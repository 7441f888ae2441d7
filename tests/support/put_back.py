"""Restore the process after each test, so that every test starts from the same state.

This covers the environment, working directory, command line, signal handlers, torch's defaults, and Megatron's state of
a run. Random generators are reseeded. Process groups stay: each test runs in a world of one (`megatron` in
conftest.py).
"""

import copy
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OF_MEGATRON = (
    ("core.num_microbatches_calculator", "", "_GLOBAL_"),
    ("core.parallel_state", "", "_MPU_"),
    ("core.parallel_state", "", "_VIRTUAL_"),
    ("core.rerun_state_machine", "", "_GLOBAL_"),
    ("core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER", "states_"),
    ("core.transformer.moe.moe_logging", "", "_MOE_METRICS_TRACKER"),
    ("core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler", "main_loss_"),
    ("core.transformer.multi_token_prediction", "MTPLossAutoScaler", "main_loss_"),
    ("core.transformer.multi_token_prediction", "MTPLossLoggingHelper", "tracker"),
    ("training.global_vars", "", "_GLOBAL_"),
)
"""Modules, objects in them, and prefixes of the attributes to restore."""
PYTESTS = "PYTEST_CURRENT_TEST"
"""An environment variable that pytest itself sets and deletes."""


@contextmanager
def put_back() -> Iterator[None]:
    """Reseed random generators; afterwards, restore what was changed inside."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    torch = sys.modules.get("torch")
    if torch:
        torch.default_generator.manual_seed(0)
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    environment, folder = os.environ.copy(), os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    values = [(owner, name, _copied(getattr(owner, name))) for owner, name in _attributes()]
    yield
    for owner, name, value in values:
        setattr(owner, name, value)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    os.chdir(folder)
    for name in os.environ.keys() - environment.keys() - {PYTESTS}:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if name != PYTESTS})
    if torch:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _attributes() -> Iterator[tuple[Any, str]]:
    yield from ((sys, "argv"), (sys, "executable"))
    for module, name, beginning in OF_MEGATRON:
        owner: Any = sys.modules.get(f"megatron.{module}")
        if owner is not None and (owner := getattr(owner, name) if name else owner) is not None:
            yield from ((owner, each) for each in list(vars(owner)) if each.startswith(beginning))


def _copied(value: Any) -> Any:
    """Return a copy of a collection that tests change in place."""
    return copy.copy(value) if type(value) in (dict, list) else value
