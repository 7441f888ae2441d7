"""A framework's model of a Hugging Face folder with attached layers: policy steps, fine-tuning, and an export.

    PYTHONPATH=ENVIRONMENT:REPOSITORY python tests/functional/stack_worker.py FRAMEWORK FOLDER OUT new|own

FRAMEWORK is a key of BUILDERS; `new` attaches a layer to the model without its own, `own` trains those of the folder.
Prints a line of JSON: what of three policy steps differs from those of the model without layers, the losses of the
layers, and who has exported. OUT is a folder that drafts.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import te_names
import torch
from torch import Tensor

warnings.filterwarnings("ignore")

LENGTH, ROWS, POLICY_STEPS, STEPS, RATE = 32, 4, 3, 24, 3e-3
VOCABULARY, WEIGHT, OURS = 96, 0.3, "megatron-mtp"
POSITIONS = torch.arange(LENGTH).expand(ROWS, -1)
OFF = {
    **dict.fromkeys(("bf16", "fp16", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False),
    **dict.fromkeys(("gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion"), False),
    **dict.fromkeys(("moe_router_fusion", "cross_entropy_loss_fusion", "moe_shared_expert_overlap"), False),
    "moe_router_load_balancing_type": "none",  # this package's model has no such loss unless it is asked for
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
}
"""Settings of a model that a CPU computes in float32; every framework's configuration has these fields."""


# --- models of frameworks --------------------------------------------------------------------------------------------


class Framework:
    """What all have in common: the layers' loss rides along."""

    def forward(self, model: Any, batch: dict[str, Tensor], **labels: Tensor) -> Tensor:
        return model(batch["tokens"], POSITIONS, None, **labels)


class Bridge(Framework):
    """Megatron-Bridge: a provider with hooks."""

    name = "megatron-bridge"

    def __init__(self, folder: Path) -> None:
        import megatron.bridge

        self.version = megatron.bridge.__version__
        self._bridge = megatron.bridge.AutoBridge.from_hf_pretrained(str(folder))

    def build(self, depths: int | None, hook: Callable[[Any], Any] | None) -> Any:
        from megatron.core.distributed import DistributedDataParallelConfig

        provider = self._bridge.to_megatron_provider()
        for field, value in {**OFF, "mtp_num_layers": depths, "seq_length": LENGTH}.items():
            setattr(provider, field, value)
        if hook is not None:
            provider.register_pre_wrap_hook(hook)
        provider.finalize()
        [model] = provider.provide_distributed_model(ddp_config=DistributedDataParallelConfig(), bf16=False, fp16=False)
        return model

    def export(self, model: Any) -> list[tuple[str, Tensor]]:
        return list(self._bridge.export_hf_weights([model], show_progress=False))


class McoreBridge(Framework):
    """mcore-bridge, the models of ms-swift: the layers are its own, and are adopted."""

    name = "mcore-bridge"

    def __init__(self, folder: Path) -> None:
        import mcore_bridge

        self.version, self._folder = mcore_bridge.__version__, folder

    def build(self, depths: int | None, hook: Callable[[Any], Any] | None) -> Any:
        from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from transformers import AutoConfig

        found = AutoConfig.from_pretrained(self._folder)
        fields = hf_to_mcore_config(found)
        config = ModelConfig(**{**fields, **OFF, "mtp_num_layers": depths})
        chunks = get_mcore_model(config)
        config.bridge.load_weights(chunks, str(self._folder))
        if hook is not None:
            chunks = hook(chunks)
        return DistributedDataParallel(config, DistributedDataParallelConfig(), chunks[0])

    def export(self, model: Any) -> list[tuple[str, Tensor]]:
        return list(model.module.config.bridge.export_weights([model.module]))


class Ours:
    """This package's own model, with the loss of its trainer."""

    name = version = OURS

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self, _: int | None, __: Any) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
        from megatron_mtp.checkpoint.convert.stream import Options
        from megatron_mtp.checkpoint.mcore.model import load_model

        with TemporaryDirectory() as checkpoint:
            hf_to_mcore(self._folder, Path(checkpoint, "mcore"), Options(quiet=True, workers=1))
            model = load_model(Path(checkpoint, "mcore")).train()
        return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)

    def forward(self, model: Any, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
        from megatron_mtp.losses.mtp_loss import logits_and_states, mtp_loss

        logits, hidden = model(batch["tokens"], POSITIONS, None, output_processor=logits_and_states)
        self.last = mtp_loss(hidden, model, batch["tokens"], labels, torch.ones_like(labels))
        logits = logits[..., :VOCABULARY]  # the rows behind pad the vocabulary
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + WEIGHT * self.last.loss

    def export(self, model: Any) -> list[tuple[str, Tensor]]:
        from megatron_mtp.checkpoint.convert.live import export_hf_weights

        return list(export_hf_weights(model, like=self._folder))


BUILDERS: dict[str, Any] = {"megatron_bridge": Bridge, "ms_swift": McoreBridge, "megatron_mtp": Ours}


# --- steps ------------------------------------------------------------------------------------------------------------


def batch_of(step: int) -> dict[str, Tensor]:
    """Rows of a chain that a small model learns: the next token is a function of the last."""
    start = torch.randint(VOCABULARY, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    row = [start]
    for _ in range(LENGTH):
        row.append((row[-1] * 5 + 7) % VOCABULARY)
    text = torch.cat(row, dim=1)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def gradients(made: Any, model: Any, batch: dict[str, Tensor], policy: bool) -> dict[str, Tensor]:
    """Of one step through Megatron's schedule: of a policy, whose forward gets no labels, or of fine-tuning."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    destroy_moe_metrics_tracker()  # it has a slot for each layer of the model that was first
    advantage = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]])

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        if not policy:
            return output.mean(), {"loss": output.detach().mean()}
        logp = output[:, :-1].float().log_softmax(-1).gather(-1, batch["tokens"][:, 1:, None])[..., 0]
        return -(advantage * logp).mean(), {}

    def forward_step(_: Any, model: Any) -> Any:
        labels = {} if policy else {"labels": batch["labels"]}
        return made.forward(model, batch, **labels), loss_of

    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([0]),
        model=[model],
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    model.finish_grad_sync()
    return {name: each.main_grad.clone() for name, each in model.module.named_parameters() if each.requires_grad}


def optimizer_of(model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from megatron_mtp.training.parameter_group import get_mtp_optimizer

    config = OptimizerConfig(optimizer="adam", lr=RATE, weight_decay=0.0, clip_grad=1.0)
    return get_mtp_optimizer(config, [model], lr=RATE, clip_grad=1.0)


def main(framework: str, folder: Path, out: Path, head: str) -> None:
    te_names.install()
    torch.manual_seed(0)
    made = BUILDERS[framework](folder)  # a framework is imported before the CPU's substitutions
    from megatron_mtp import cpu
    from megatron_mtp.patches import table

    cpu.install()
    if made.name == OURS:
        table.install()
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(1)
    model_parallel_cuda_manual_seed(3)
    own = 1 if head == "own" or framework == "ms_swift" else None
    record: dict[str, Any] = {"framework": made.name, "version": made.version}
    if made.name != OURS:
        record |= policy_steps(made, own)
    model, record["losses"] = fine_tuned(made, own)
    exports, tensors, config = exported(made, model, folder)
    write(tensors, config, out)
    print(json.dumps(record | exports))


def attaching(settings: dict[str, Any], attached: list[Any]) -> Callable[[Any], Any]:
    """A hook as integrations/README.md has it."""
    from megatron_mtp.attach import attach
    from megatron_mtp.config import MTPConfig

    def hook(chunks: Any) -> Any:
        attached.append(attach(chunks, 1, MTPConfig(**settings), weight=WEIGHT))
        return chunks

    return hook


def policy_steps(made: Any, own: int | None) -> dict[str, Any]:
    """What differs between steps without layers and with some, how many of the layers' parameters have a gradient, and
    whether an export of the model that was built without layers lacks them."""
    apart = {"mtp_train_only": True, "mtp_loss": "kd"}
    plain, policy = made.build(None, None), made.build(own, attaching(apart, []))
    optimizers = optimizer_of(plain), optimizer_of(policy)
    differ, learned = set(), set()
    for step in range(POLICY_STEPS):
        expected, found = (gradients(made, one, batch_of(step), policy=True) for one in (plain, policy))
        differ |= {name for name, value in expected.items() if not torch.equal(found[name], value)}
        learned |= {name for name, value in found.items() if name.startswith("mtp.") and value.any()}
        for one in optimizers:
            one.step()
    weights = dict(policy.module.named_parameters())
    differ |= {f"weight of {n}" for n, each in plain.module.named_parameters() if not torch.equal(each, weights[n])}
    lost = not any("eh_proj" in name for name, _ in made.export(plain))
    return {"differ": sorted(differ), "learned": len(learned), "lost without": lost}


def fine_tuned(made: Any, own: int | None) -> tuple[Any, list[float]]:
    """A model after steps of fine-tuning, and the layers' loss in the first and the last of them."""
    attached: list[Any] = []
    model = made.build(own, attaching({}, attached))
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        gradients(made, model, batch_of(step), policy=False)
        losses.append((attached or [made])[-1].last.depth_means.item())
        optimizer.step()
    return model, [losses[0], losses[-1]]


def exported(made: Any, model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Who exports, all tensors of a folder, and its config.

    The framework exports; this package does where the framework has no names for the layers, in the form of a family
    that has. Tensors that both export are compared.
    """
    from megatron_mtp.checkpoint.convert.export_hf import form_of
    from megatron_mtp.checkpoint.convert.import_hf import megatron_arguments
    from megatron_mtp.checkpoint.convert.live import LiveReader, export_hf_weights
    from megatron_mtp.checkpoint.convert.plan import HFModel

    tensors, config = dict(made.export(model)), json.loads((folder / "config.json").read_text())
    by = made.name
    if "num_nextn_predict_layers" in config:
        ours = dict(export_hf_weights(model, like=folder, only_mtp=True))
    else:
        args = megatron_arguments(HFModel.read(folder))
        ours, tensors = dict(export_hf_weights(model, args)), {}
        by, config = "export_hf_weights", dict(form_of(LiveReader([model], args)).keys)
    unequal = [name for name, value in ours.items() if name in tensors and not torch.equal(value, tensors[name])]
    return {"exported by": by, "unequal": unequal}, ours | tensors, config


def write(tensors: dict[str, Tensor], config: dict[str, Any], out: Path) -> None:
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: each.detach().clone().contiguous() for name, each in tensors.items()}, out / "model.safetensors")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
