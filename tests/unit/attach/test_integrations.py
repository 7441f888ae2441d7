"""The patches of integrations/ apply to the releases they name, and the patched functions attach the layers.

A framework's launcher needs its whole cluster, so only the patched function is compiled, with stand-ins for what it
calls, and gets a stock model. Three policy gradient steps then match the same model without layers.
"""

import ast
import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from zipfile import ZipFile

import pytest
import torch
from documents import ROOT
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron_single import LENGTH, make_batch
from stock_models import draw, learned, stock
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.attach import attach
from megatron_mtp.spec.config import MTPConfig

pytestmark = pytest.mark.usefixtures("megatron")

FOLDER = ROOT / "integrations"
PATCHES = sorted(FOLDER.glob("*.patch"))
LIMIT = 10


@dataclass(frozen=True)
class Patched:
    """A framework's function that a patch changes.

    Attributes:
        wheel: the release; None if the text is a stand-in in this file.
        file, function: where the layers are attached.
        call: calls the function with a model builder; returns the chunks.
        names: globals that the function needs.
    """

    wheel: str | None
    file: str
    function: str
    call: Callable[[Any, "Provider"], Any]
    names: dict[str, Any] = field(default_factory=dict)


class Provider(MagicMock):
    """Build a stock model, and run registered hooks, as Megatron-Bridge does."""

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
"""Patched functions by patch name; tests/functional/test_users_script.py runs Megatron-LM's own script."""


class Globals(dict[str, Any]):
    """Globals of an isolated function: Python's names, and stand-ins for all others."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name) if hasattr(builtins, name) else MagicMock()


def compiled(path: Path, function: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compile one function with these globals; missing modules that it imports are stand-ins."""
    found = next(
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    for node in ast.walk(found):
        away = isinstance(node, ast.ImportFrom) and re.match(r"(?!megatron\.core|megatron_mtp)", node.module or "")
        if away:
            monkeypatch.setitem(sys.modules, node.module, MagicMock())
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], found], [])
    names = Globals(given)
    exec(compile(module, path, "exec"), names)
    made = names[function]
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
    """Check that the trunk's logits, gradients and weights are bit-identical to those without layers, which learn."""
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


PROMPT = 10
AT_TOKENS = (torch.arange(LENGTH) >= PROMPT).float().expand(3, -1)
"""NeMo-RL's `token_mask`: 1 if the token was generated."""
AT_LABELS = pad(torch.ones(3, LENGTH - PROMPT), (PROMPT - 1, 1))
"""slime's `full_loss_masks` for the same rows: 1 if the next token was generated."""


def check_mask(model: Any, mask_BS: Tensor, **given: str) -> None:
    """Check that the layers count the generated tokens, wherever the framework puts its mask."""
    batch = make_batch(2)
    arguments = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    model(*arguments, loss_mask=mask_BS, **{name: batch[key] for name, key in given.items()})
    counted = model.mtp_attached.last.depth_means
    with torch.no_grad():
        model(*arguments)
        assert torch.equal(model.mtp_attached.loss(batch["tokens"], None, AT_LABELS).depth_means, counted)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_is_short_and_its_calls_are_valid(patch: Path) -> None:
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
    function = compiled(tmp_path / stack.file, stack.function, stack.names, monkeypatch)
    [model] = stack.call(function, Provider())
    check_three_policy_steps(model)
    check_mask(model, AT_TOKENS)
    check_mask(model, AT_TOKENS, labels="tokens")  # NeMo-RL's fused head shifts them itself


LOOP = {
    "torch": torch,
    "mpu": mpu,
    "partial": partial,
    "get_forward_backward_func": get_forward_backward_func,
    "get_model_config": lambda model: model.config,
    "make_batch_generator": lambda batches, vpp_size: iter(batches),
    "_copy_tensor_dict_to_device": lambda batch, _: dict(batch),
    "_microbatch_sample_support": lambda *_, **__: None,
    "remove_left_padding": lambda *given, **_: given[:3],
    "recover_left_padding": lambda output, *_, **__: output,
    "from_parallel_logits_to_logprobs": lambda logits_BSV, tokens_BS, **_: (
        logits_BSV[:, :-1].log_softmax(-1).gather(-1, tokens_BS[:, 1:, None])[..., 0]
    ),
    "masked_mean": lambda values, _: values.mean(),
    "vocab_parallel_entropy": lambda logits_BSV, **_: torch.zeros(logits_BSV.shape[:2]),
    "compute_minibatch_rollout_logprob_diff_metrics": lambda *_: {},
}
"""What SkyRL's loop calls, for rows without padding."""


@pytest.mark.matrix
def test_skyrls_loop_trains_the_layers_beside_a_policy_that_does_not_change_by_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mini-batches run through Megatron's schedule; without the patch the layers would run twice."""
    wheel, file = STACKS["skyrl"].wheel, STACKS["skyrl"].file.replace("megatron_worker", "megatron_model_wrapper")
    assert wheel is not None
    unpacked(wheel, tmp_path)
    apply(FOLDER / "skyrl.patch", tmp_path)
    batch, rate = make_batch(2), torch.tensor([[1.0], [-0.5], [0.25]])
    names = {**LOOP, "to_te_attention_mask": lambda _: batch["attention_mask"]}
    loop = compiled(tmp_path / file, "forward_backward_mini_batch", names, monkeypatch)
    settings = MagicMock()
    off = dict.fromkeys(("enable_sample_support_replay", "use_entropy_loss", "use_kl_loss"), False)
    settings.algorithm = SimpleNamespace(**off, kl_loss_coef=0.0, policy_loss_type="regular")
    plain, model = stock("dense"), stock("dense")
    attach(model, 1, MTPConfig(mtp_train_only=True, mtp_loss="kd"), weight=0.1)
    for each in (plain, model):
        draw(each)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, model)]
    micro = {
        **dict.fromkeys(("old_action_log_probs", "base_action_log_probs", "rollout_action_logprobs")),
        **dict.fromkeys(("response_mask", "rollout_expert_indices")),
        "sequences": batch["tokens"],
        "attention_mask": torch.ones_like(batch["tokens"]),
        "position_ids": batch["position_ids"],
        "num_actions": 4,
        "advantages": rate,
        "loss_mask": None,
        "num_microbatches": 2,
    }

    def policy_loss(logprobs_BS: Tensor, _: Any, advantages_B1: Tensor, **__: Any) -> tuple[Tensor, dict[str, Any]]:
        return -(advantages_B1 * logprobs_BS).mean(), {}

    for _ in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            worker = MagicMock(
                actor_module=[each], cfg=settings, is_vlm=False, remove_microbatch_padding=False, _fused_lm_head=False
            )
            worker.policy_loss_fn = policy_loss
            loop(worker, [micro, micro], LENGTH, len(rate))
            optimizer.step()
        found = dict(model.named_parameters())
        for name, weight in plain.named_parameters():
            assert torch.equal(weight, found[name]), name
            assert torch.equal(weight.grad, found[name].grad), name
        assert all(weight.grad.any() for name, weight in found.items() if name.startswith("mtp."))


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
    assert [args.custom_model_provider_path for args in asked] == [None]  # otherwise slime would call this one again
    check_three_policy_steps(model)
    check_mask(model, AT_LABELS)
