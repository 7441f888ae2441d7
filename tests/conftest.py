"""Select which tests run, and which files run first.

Tests without a mark form the first tier. Tests marked `matrix` run only with `--all`: a test of the first tier catches
the same faults (`plant_faults.py`).
"""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from put_back import put_back
from quicker import collect_new_objects_alone

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Read when torch is imported. Two workers whose threads wait for each other take ten times as long on two cores."""

LONGEST = """
    layouts attached_layouts verify drafting drafter_commands live_drafts state_cache ring_ranks graphs types serve
    engine triton_chunk graft gpu_check prove convert_tool drafting_methods document_commands serving_life
    audit_drafters stacks benchmarks hybrid_drafting trunk_families verifiers generate loading quantized_export
    wrapped commands killed_training killed_conversion features migrated_training extensions_away precision conversion
    faults resume linear_cross_entropy migration serving weight_updates weight_gradient verify_numbers trunk_only
""".split()
"""The slowest test files, by their names after `test_`. They run first: a slow file at the end would keep a single
worker busy.
"""

MOST_WORKERS = 8
"""Each takes up to 2 GB of memory."""

LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the cases marked `matrix` as well")


@pytest.hookimpl(optionalhook=True)  # absent with -p no:xdist
def pytest_xdist_auto_num_workers() -> int:
    """Start a worker on each core."""
    return min(os.cpu_count() or 1, MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start no workers for a single file, since one worker would run all of it."""
    given = config.invocation_params.args
    says = any(str(word).startswith(("-n", "--numprocesses", "--dist", "--tx")) for word in given)
    files = {str(word).partition("::")[0] for word in config.args}
    if not says and len(files) == 1 and files.pop().endswith(".py"):
        config.option.numprocesses, config.option.dist = 0, "no"


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist's option, which runs files with many tests first
    config.stash[LEFT_OUT] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem.removeprefix("test_"), len(places)))
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("matrix")]
    items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    config.stash[LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = len(left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, bool, bool]:
    """Collect tests with the garbage collector off; it would take a third of the time."""
    gc.disable()
    found = yield
    collect_new_objects_alone()
    gc.enable()
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Report deselected tests once: every xdist worker deselects the same ones and does not report them."""
    count = getattr(node, "workeroutput", {}).get("left out", 0)
    if not node.config.stash[LEFT_OUT]:
        node.config.stash[LEFT_OUT] = count
        node.config.hook.pytest_deselected(items=[node] * count)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash[LEFT_OUT]:
        terminalreporter.write_line(f"{count} cases marked `matrix` were left out; --all runs them as well")


@pytest.fixture(scope="module", autouse=True)
def _a_file_leaves_nothing() -> Iterator[None]:
    with put_back():
        yield


@pytest.fixture(autouse=True)
def _a_test_leaves_nothing() -> Iterator[None]:
    with put_back():
        yield


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """Create a process group of one rank and Megatron's parallel state, which building a model needs.

    Use exact float32 products: NVIDIA's images enable TF32, whose 10-bit mantissa is less than the tests' tolerances.
    """
    from megatron_mtp.megatron.runtime import prepare

    prepare()
    from megatron_single import join_world_of_one  # imports Megatron, so only after prepare()

    from megatron_mtp.checkpoint.verify.prompt import exact_float32

    join_world_of_one()
    with exact_float32():
        yield


@pytest.fixture(scope="module")
def forked_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a program that runs Python in forks; the package's subprocesses (`sys.executable`) are forks too."""
    import fork_server

    program = fork_server.program(tmp_path_factory.mktemp("forked") / "python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        yield program
