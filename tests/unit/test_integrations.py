"""The patches of integrations/ apply to the releases they name, and the patched functions attach the layers.

A framework's launcher needs its whole cluster; so its patched function alone is compiled, with stand-ins for what it
calls, and is given a stock model. Then three steps of a policy gradient are those of the same model without layers.
"""

import ast
import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from zipfile import ZipFile

import pytest
import torch
from documents import ROOT
from megatron.core import mpu
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron_single import make_batch
from stock_models import draw, learned, stock

from megatron_mtp.attach import attach

pytestmark = pytest.mark.usefixtures("megatron")

FOLDER = ROOT / "integrations"
PATCHES = sorted(FOLDER.glob("*.patch"))
LIMIT = 10


@dataclass(frozen=True)
class Patched:
    """A function of a framework that a patch changes.

    Attributes:
        wheel: the release; None where the text is a stand-in of this file.
        file, function: where the layers are attached.
        call: calls the function with a builder of models; returns the chunks.
        names: globals of the function that matter.
    """

    wheel: str | None
    file: str
    function: str
    call: Callable[[Any, "Provider"], Any]
    names: dict[str, Any] = field(default_factory=dict)


class Provider(MagicMock):
    """Builds a stock model, and runs the hooks that were registered, as Megatron-Bridge's does."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.hooks: list[Any] = []
        self.register_pre_wrap_hook = self.hooks.append
        self.provide_distributed_model = lambda **_: self.built(self.hooks)

    def _get_child_mock(self, **named: Any) -> MagicMock:
        return MagicMock(**named)

    def built(self, hooks: Any) -> list[Any]:
        chunks: Any = [stock("dense")]
        for hook in hooks:
            chunks = hook(chunks)
        return list(chunks)


def swifts_models(*_: Any) -> list[Any]:
    model = stock("dense")
    model.config.bridge = MagicMock()
    return [model]


def of_swift(prepare_model: Any, provider: Provider) -> Any:
    trainer = MagicMock()
    prepare_model(trainer)
    return trainer.wrapped_models


def of_verl(make: Any, provider: Provider) -> Any:
    wraps = SimpleNamespace(is_value_model=False, wrap_with_ddp=True, use_layer_wise_distributed_optimizer=False)
    wraps.use_distributed_optimizer = wraps.use_megatron_fsdp = False
    return make(wraps, MagicMock(), MagicMock(), bridge=MagicMock(), provider=provider)[0]


def of_areal(make: Any, provider: Provider) -> Any:
    bridge, settings = MagicMock(), MagicMock(virtual_pipeline_parallel_size=1, wrap_with_ddp=True)
    bridge.to_megatron_provider.return_value = provider
    return make(MagicMock(), MagicMock(), settings, bridge, bridge_type="megatron-bridge")


NEMO_RL = """
def setup_model_and_optimizer(load_optimizer, additional_pre_wrap_hooks=None):
    pre_wrap_hook = []
    if additional_pre_wrap_hooks:
        pre_wrap_hook.extend(additional_pre_wrap_hooks)

    return get_model(pre_wrap_hook)
"""

STACKS = {
    "ms_swift": Patched(
        "ms-swift==4.6.0",
        "swift/megatron/trainers/base.py",
        "prepare_model",
        of_swift,
        {"get_mcore_model": swifts_models, "wrap_model": lambda _, models: models},
    ),
    "skyrl": Patched(
        "skyrl==0.4.0",
        "skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py",
        "make_megatron_module",
        lambda make, provider: make(SimpleNamespace(provider=provider)),
    ),
    "verl": Patched(
        "verl==0.9.1",
        "verl/utils/megatron_utils.py",
        "make_megatron_module",
        of_verl,
        {"MLATransformerConfig": MLATransformerConfig},
    ),
    "areal": Patched("areal==1.0.4", "areal/models/mcore/registry.py", "make_mcore_model", of_areal, {"mpu": mpu}),
    "nemo_rl": Patched(
        None,
        "nemo_rl/models/megatron/setup.py",
        "setup_model_and_optimizer",
        lambda setup, provider: setup(True),
        {"get_model": lambda hooks: Provider().built(hooks)},
    ),
}
"""By the patch's name; Megatron-LM's own script is run in tests/functional/test_users_script.py."""


class Globals(dict[str, Any]):
    """Names that a function alone does not find: those of Python, else stand-ins."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name) if hasattr(builtins, name) else MagicMock()


def compiled(path: Path, stack: Patched, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function alone; modules that it imports and that are not here are stand-ins."""
    found = next(
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == stack.function
    )
    for node in ast.walk(found):
        away = isinstance(node, ast.ImportFrom) and re.match(r"(?!megatron\.core|megatron_mtp)", node.module or "")
        if away:
            monkeypatch.setitem(sys.modules, node.module, MagicMock())
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], found], [])
    names = Globals(stack.names)
    exec(compile(module, path, "exec"), names)
    made = names[stack.function]
    assert isinstance(made, FunctionType)
    return made


def apply(patch: Path, folder: Path) -> None:
    done = subprocess.run(["git", "apply", "-v", patch], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def unpacked(wheel: str, folder: Path) -> None:
    words = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), wheel]
    got = subprocess.run([sys.executable, "-m", "pip", "download", *words], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of {wheel}: {got.stderr.strip()[-200:]}")
    with ZipFile(wheels[0]) as packed:
        packed.extractall(folder)


def changed_lines(patch: Path) -> list[str]:
    return [line for line in patch.read_text().splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]


def check_three_policy_steps(model: Any) -> None:
    """Logits, gradients and weights of the trunk are bit by bit those without the layers, which learn."""
    plain, batch = stock("dense"), make_batch(2)
    for each in (plain, model):
        draw(each)
    before = {name: each.detach().clone() for name, each in model.mtp.named_parameters()}
    for _ in range(3):
        expected, found = learned(plain, batch, None, None), learned(model, batch, None, None)
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
        for each in (plain, model):
            each.zero_grad()
    assert all(not torch.equal(each, before[name]) for name, each in model.mtp.named_parameters())


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_is_short_and_calls_what_there_is(patch: Path) -> None:
    lines = changed_lines(patch)
    assert 0 < len(lines) <= LIMIT
    [row] = [line for line in (FOLDER / "README.md").read_text().splitlines() if f"`{patch.name}` |" in line]
    assert row.split("|")[3].strip() == str(len(lines))
    added = inspect.cleandoc("\n" + "\n".join(line[1:] for line in lines if line[0] == "+"))
    calls = re.findall(r"attach\((?:[^()]|\([^()]*\))*\)", added)
    assert calls
    for call in calls:
        node = ast.parse(call, mode="eval").body
        assert isinstance(node, ast.Call)
        named = {one.arg: None for one in node.keywords if one.arg}
        inspect.signature(attach).bind(*node.args, **named)


@pytest.mark.parametrize(
    "name",
    [name if stack.wheel is None else pytest.param(name, marks=pytest.mark.matrix) for name, stack in STACKS.items()],
)
def test_the_patched_function_attaches_layers_and_the_policy_does_not_change_by_a_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = STACKS[name]
    if stack.wheel is None:
        (tmp_path / stack.file).parent.mkdir(parents=True)
        (tmp_path / stack.file).write_text(NEMO_RL)
    else:
        unpacked(stack.wheel, tmp_path)
    apply(FOLDER / f"{name}.patch", tmp_path)
    function = compiled(tmp_path / stack.file, stack, monkeypatch)
    [model] = stack.call(function, Provider())
    check_three_policy_steps(model)


def test_slimes_provider_attaches_to_the_model_that_slime_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get_model_provider_func(args: Any) -> Any:
        asked.append(args)
        return lambda pre_process, post_process, vp_stage: stock("dense")

    training = MagicMock(get_args=lambda: SimpleNamespace(custom_model_provider_path="integrations.slime.provider"))
    for module, stand_in in (
        ("megatron.training", training),
        ("slime.backends.megatron_utils.model_provider", MagicMock(get_model_provider_func=get_model_provider_func)),
    ):
        monkeypatch.setitem(sys.modules, module, stand_in)
    names: dict[str, Any] = {}
    exec((FOLDER / "slime.py").read_text(), names)
    model = names["provider"]()
    assert [args.custom_model_provider_path for args in asked] == [None]  # else slime would ask for this one again
    check_three_policy_steps(model)
