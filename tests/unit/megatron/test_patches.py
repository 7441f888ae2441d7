"""The table of patches: every probe finds its bug in the installed version, and a fixed function is left alone."""

import ast
import json
import os
import queue
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.training import training

import megatron_mtp
from megatron_mtp.cli import main as cli
from megatron_mtp.common.errors import InputError
from megatron_mtp.megatron.patches import layers, saving
from megatron_mtp.megatron.patches import patch as engine
from megatron_mtp.megatron.patches.loop import LOOP, has_no_callbacks
from megatron_mtp.megatron.patches.patch import CORE, Patch, State, apply, original_of, state_of, while_replaced
from megatron_mtp.megatron.patches.table import PATCHES
from megatron_mtp.training.metrics import Metrics
from megatron_mtp.training.run import observed

ROWS = (*PATCHES, *LOOP)
NEWER = {"megatron-core": "0.19.3", "torch": "2.12.1"}
"""Releases that the table does not list."""


@pytest.fixture(autouse=True)
def forgotten_answers() -> Iterator[None]:
    """Clear the answers, which are cached per process: only these tests change Megatron's functions."""
    yield
    engine._answer.cache_clear()


def named(row: Patch) -> str:
    """Return a row's name; several have the same target."""
    return f"{row.name}: {row.reason[:30]}"


# --- functions as a later release may have them -----------------------------------------------------------------------


def compile_helpers() -> None:
    """Nothing to compile."""


def get_tokens_per_expert_and_token_count(
    routing_map: torch.Tensor, reduce_group: Any, topk: int = 1, with_padding_mask: bool = False
) -> Any:
    local = routing_map.sum(dim=0)
    own = local.sum() / topk
    total = reduce_from_tensor_model_parallel_region(local, reduce_group)
    return total, own, total.sum() / topk


def report(tracker: Any, loss_scale: float, iteration: int, total_loss_dict: dict[str, Any], **others: Any) -> str:
    total_loss_dict["loss"] = torch.ones(())
    return ""


class DistributedOptimizer:
    def state_dict(self) -> dict[str, Any]:
        return {}


def get_megatron_optimizer(optimizer: Any) -> Any:
    optimizer.is_stub_optimizer = True
    return optimizer


def get_write_results_queue(mp_mode: str = "spawn") -> Any:
    return queue.Queue()


def save_sealed(state: Any, checkpoint_dir: str, verify_integrity: bool = True) -> None: ...


def save_lent(state: Any, checkpoint_dir: str) -> None:
    torch.distributed.gather_object(state)


def save_unmarked(state: Any, checkpoint_dir: str) -> None:
    (Path(checkpoint_dir) / "metadata.json").unlink()
    save_preprocess(state)


def load_partial(state: Any, checkpoint_dir: str, missing_keys_stay: bool = False) -> None: ...


def called_by_nothing() -> None:
    """The loop calls a different function."""


MENDED: dict[Any, Any] = {
    layers.compiles_without_makefile: compile_helpers,
    layers.sum_overwrites_count: get_tokens_per_expert_and_token_count,
    layers.counts_other_routers: report,
    saving.needs_first_step: DistributedOptimizer,
    saving.makes_no_stubs: get_megatron_optimizer,
    saving.leaves_helper: get_write_results_queue,
    saving.seals_nothing: save_sealed,
    saving.lends_nothing: save_lent,
    saving.reads_every_entry: load_partial,
    saving.keeps_mark: save_unmarked,
}
"""Fixed functions by probe. For the other rows, the patched original counts as fixed."""


def mend(row: Patch, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the row's target by a fixed function, in a release that the table does not know."""
    monkeypatch.setattr(engine, "installed", lambda package: NEWER[package])
    mended = original_of(row)
    if row.probe is has_no_callbacks or row in LOOP[:5]:
        monkeypatch.setattr(training, "pretrain", lambda config, callbacks=(): None)
    elif row in LOOP:
        mended = called_by_nothing
    elif row.probe in MENDED:
        mended = MENDED[row.probe]
    else:
        assert row.replacement is not None
        ours = row.replacement(mended)
        mended = lambda *given, **named: ours(*given, **named)  # noqa: E731
    monkeypatch.setattr(row.owner(), row.name.rpartition(".")[2], mended)
    return mended


def check_row(row: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the probe finds the bug of the installed version, and the patch leaves a fixed function alone."""
    assert row.probe(original_of(row)) is True
    with monkeypatch.context() as patched:
        mended = mend(row, patched)
        assert state_of(row) is State.NOT_NEEDED
        apply([row])
        with while_replaced(LOOP, {row.name: lambda _: None} if row in LOOP else {}):
            assert getattr(row.owner(), row.name.rpartition(".")[2]) is mended


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_fixed_function_is_left_alone(row: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    check_row(row, monkeypatch)


@pytest.mark.parametrize("row", PATCHES, ids=named)
@pytest.mark.parametrize("answer", [True, False, None])
def test_a_broken_probe_is_seen(row: Patch, answer: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = row.probe
    broken = replace(row, probe=lambda _: answer)
    monkeypatch.setitem(MENDED, broken.probe, MENDED.get(probe))
    with pytest.raises(AssertionError):
        check_row(broken, monkeypatch)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_every_row_is_applied_here_and_says_why(row: Patch) -> None:
    assert state_of(row) is State.APPLIED
    assert row.reason.endswith(".")
    assert len(row.reason) > 20
    assert row.upstream
    if row in PATCHES:
        assert getattr(row.owner(), row.name.rpartition(".")[2]) is not original_of(row)


def test_an_inconclusive_probe_warns_in_an_unknown_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = replace(PATCHES[1], probe=lambda _: None)
    assert state_of(row) is State.APPLIED
    monkeypatch.setattr(engine, "installed", lambda package: NEWER[package])
    assert state_of(row) is State.UNKNOWN
    with pytest.warns(UserWarning, match=r"the installed 0\.19\.3 was not tried"):
        apply([row])
    assert state_of(replace(row, probe=lambda _: 1 / 0)) is State.UNKNOWN


def test_a_missing_function_is_named() -> None:
    row = replace(PATCHES[0], target="megatron.core.datasets.utils:no_such_function")
    assert state_of(row) is State.MISSING
    with pytest.raises(RuntimeError, match=r"utils:no_such_function .* has no such function"):
        apply([row])


def test_a_probe_runs_once_for_each_original_function() -> None:
    asked: list[Any] = []
    row = replace(PATCHES[1], probe=lambda original: bool(asked.append(original)))
    assert [state_of(row), state_of(row)] == [State.NOT_NEEDED] * 2
    assert asked == [original_of(row)]


ON_A_GPU = """
import torch, traceback
started = []
torch.cuda._lazy_init = lambda: started.append("".join(traceback.format_stack()))
torch.cuda.is_available = lambda: True
from late_preparation import import_everything
from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.runtime import prepare
prepare()
import_everything()
from torch._dynamo.utils import counters
assert not cpu.installed()
assert not counters["frames"], f"compiled: {dict(counters['frames'])}"
assert not started, "CUDA was started:" + started[0]
"""
"""Simulates a machine with a GPU, for imports and `prepare()`. Initializing CUDA would fix every rank's device."""


@pytest.mark.matrix
def test_with_a_gpu_nothing_is_compiled_and_cuda_is_not_started() -> None:
    command, helpers = [sys.executable, "-c", ON_A_GPU], Path(__file__).parents[2] / "support"
    done = subprocess.run(command, cwd=helpers, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_patches_of_one_target_are_adjacent() -> None:
    targets = [row.target for row in PATCHES]
    blocks = [target for target, before in zip(targets, ["", *targets], strict=False) if target != before]
    assert len(blocks) == len(set(targets))


def test_a_loop_that_cannot_be_observed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "train_step", called_by_nothing)
    with pytest.raises(InputError, match="install a version in that range"), observed(Metrics(None)):
        pass


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_the_doctor_prints_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["doctor", "--probe", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["patches"]
    assert [row["target"] for row in shown] == [row.target for row in ROWS]
    assert {row["state"] for row in shown} == {"applied"}
    mend(PATCHES[0], monkeypatch)
    assert cli.main(["doctor", "--probe"]) == 0
    text = capsys.readouterr().out
    assert "compile_helpers: not needed (the installed version does not have the fault)\n  The wheel" in text
    assert f"Versions: megatron-core {CORE}; upstream: none known." in text
    assert f"{len(ROWS) - 1} applied" in text


def test_without_probes_the_doctor_goes_by_versions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.datasets.utils.compile_helpers", compile_helpers)  # only a probe detects this
    assert cli.main(["doctor"]) == 0
    assert re.search(rf"^ok   patches +{len(ROWS)} known version:", capsys.readouterr().out, re.M)
    monkeypatch.setattr(engine, "installed", lambda _: "0.19.9")
    assert cli.main(["doctor", "--patches"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^-    patches +{len(ROWS)} unknown version:", text, re.M)
    assert "compile_helpers: unknown version (--probe tests whether it has the fault)\n  The wheel" in text


def test_the_version_is_that_of_the_checkout_on_the_path(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('nobody imports it')\n")
    (core / "package_info.py").write_text("__version__ = '0.20.0rc1+abc'\n")
    code = "from megatron_mtp.megatron.patches.patch import installed; print(installed('megatron-core'))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0.20.0rc1\n"


def test_the_doctor_needs_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24


def test_the_doctor_does_not_import_megatron() -> None:
    script = (
        "import sys; from megatron_mtp.cli import main as cli; cli.main(['doctor']); "
        "print('megatron.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("training can run here\nFalse\n")


def test_a_missing_function_is_a_failed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("megatron.core.datasets.utils.compile_helpers")
    assert cli.main(["doctor", "--probe"]) == 1
    assert "FAIL patches" in capsys.readouterr().out


# --- nothing of Megatron is replaced elsewhere ------------------------------------------------------------------------

PACKAGE = Path(megatron_mtp.__file__).parent


def assignments(source: str) -> list[str]:
    """Return attributes of Megatron imports that a file assigns to."""
    tree = ast.parse(source)
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "megatron"
    }
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            targets.append(ast.Attribute(node.args[0], ast.unparse(node.args[1]), ast.Store()))
    return [
        ast.unparse(target)
        for target in targets
        if isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in imported
    ]


OF_A_LAB = ("worker.py", "stand_ins.py", "script_worker.py")
"""Files of `prove` that run in processes of the tested Megatron, never in this package's."""

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "prove" or path.name not in OF_A_LAB)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_replaces_nothing_of_megatron(path: Path) -> None:
    assert assignments(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from megatron.training import training\ntraining.train_step = print",
        "import megatron.core\nmegatron.core.x.y = 1",
        "from megatron.training import training as t\ndef f():\n    setattr(t, 'train_step', print)",
    ],
)
def test_a_planted_assignment_is_seen(source: str) -> None:
    assert len(assignments(source)) == 1


# --- the average over routers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "routers"),
    [
        ({"moe_layer_freq": 1, "mtp_num_layers": 2}, 6),
        ({"moe_layer_freq": 1, "mtp_num_layers": 2, "mtp_use_repeated_layer": True}, 5),
        ({"moe_layer_freq": 1, "mtp_num_layers": 1, "mtp_use_repeated_layer": True, "mtp_unroll": 3}, 5),
        ({"moe_layer_freq": 2, "mtp_num_layers": 2}, 2),
        ({"moe_layer_freq": [0, 0, 1, 1], "mtp_num_layers": None}, 2),
        ({"moe_layer_freq": 1, "mtp_num_layers": 2, "mtp_train_only": True}, 2),
        ({"hybrid_layer_pattern": "M-*E/*E", "mtp_num_layers": 1}, 2),
        ({"hybrid_layer_pattern": "*E|*E/EE/EE", "mtp_num_layers": 2}, 6),
        ({"hybrid_layer_pattern": "M-*E/*-", "mtp_num_layers": 1}, 1),
        ({"hybrid_layer_pattern": "M-|*E", "mtp_num_layers": None}, 1),
    ],
)
def test_logged_losses_are_the_mean_of_all_routers(
    flags: dict[str, Any], routers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers; every router records 1.0; a stage without routers has the same size."""
    default = {"hybrid_layer_pattern": None, "num_layers": 4, "mtp_use_repeated_layer": False}
    args = Namespace(**default | flags)
    passes = flags.get("mtp_unroll") or flags["mtp_num_layers"] or 0
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr(MoEMetricsTracker, "_sync_metrics", lambda *_: None)
    losses, tracker, empty = dict[str, Any](), MoEMetricsTracker(), MoEMetricsTracker()
    for _ in range(routers):
        tracker.record("loss", torch.ones(()), 1, args.num_layers + passes)
    for one in (empty, tracker):
        losses.clear()
        one.report(1.0, 0, track_names="loss", force_initialize=True, total_loss_dict=losses)
    assert losses["loss"] == 1
    assert len(empty.metrics["loss"].values) == len(tracker.metrics["loss"].values)
