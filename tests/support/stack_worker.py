"""A framework's model of a Hugging Face folder with attached layers: training steps and an export.

    PYTHONPATH=ENVIRONMENT:REPOSITORY:REPOSITORY/tests/support python tests/support/stack_worker.py FRAMEWORK

FRAMEWORK is a key of BUILDERS. It is imported once; a fork runs each job, a line of JSON on standard input:

    [JOB, FOLDER, CORPUS, OUT, "new" or "own"]

JOB is a key of JOBS. `new` attaches a layer to the model without its own MTP layers, `own` trains those of the folder,
and the name of a drafter kind attaches a drafter. CORPUS has the rows that `megatron-mtp train` reads with the same
seed. A job prints a line of JSON, {} if it failed, and writes folders into OUT.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import te_names
import torch
from job_forks import for_each_job
from stack_rows import LENGTH, RATE, ROWS, SEED, SPLIT, STEPS, VOCABULARY, WEIGHT
from torch import Tensor

warnings.filterwarnings("ignore")

Hook = Callable[[Any], Any]
POLICY_STEPS, RANK, LORA_RATE = 3, 8, 2e-2
POSITIONS = torch.arange(LENGTH).expand(ROWS, -1)
OFF = {
    **dict.fromkeys(("bf16", "fp16", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False),
    **dict.fromkeys(("gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion"), False),
    **dict.fromkeys(("moe_router_fusion", "cross_entropy_loss_fusion", "moe_shared_expert_overlap"), False),
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "none",  # this package's model has no such loss by default
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
}
"""Settings for float32 on a CPU; every framework's configuration has these fields."""


# --- the frameworks' models -------------------------------------------------------------------------------------------


class Bridge:
    """Megatron-Bridge: a provider with hooks."""

    name, module, builds_layers = "megatron-bridge", "megatron.bridge", False

    def __init__(self, folder: Path) -> None:
        import megatron.bridge

        self.version = megatron.bridge.__version__
        self._bridge = megatron.bridge.AutoBridge.from_hf_pretrained(str(folder))

    def build(self, depths: int | None, *hooks: Hook) -> Any:
        from megatron.core.distributed import DistributedDataParallelConfig

        provider = self._bridge.to_megatron_provider()
        for field, value in {**OFF, "mtp_num_layers": depths, "seq_length": LENGTH}.items():
            setattr(provider, field, value)
        for hook in hooks:
            provider.register_pre_wrap_hook(hook)
        provider.finalize()
        [model] = provider.provide_distributed_model(ddp_config=DistributedDataParallelConfig(), bf16=False, fp16=False)
        return model

    def lora(self, head: str, attaching: Hook | None) -> list[Hook]:
        """`finetune` registers the PEFT hook after the user's hooks."""
        from megatron.bridge.peft.lora import LoRA
        from megatron.bridge.peft.utils import create_peft_hook

        from integrations.megatron_bridge import LoRAWithHead

        if attaching is not None and head == "new":
            return [create_peft_hook(LoRAWithHead(dim=RANK, alpha=2 * RANK))]
        adapting = create_peft_hook(LoRA(dim=RANK, alpha=2 * RANK))
        return [adapting] if attaching is None else [attaching, adapting]

    def export(self, model: Any) -> list[tuple[str, Tensor]]:
        return list(self._bridge.export_hf_weights([model], show_progress=False))


class McoreBridge:
    """mcore-bridge, the models of ms-swift: it has its own MTP layers, which are adopted."""

    name, module, builds_layers = "mcore-bridge", "mcore_bridge", True

    def __init__(self, folder: Path) -> None:
        import mcore_bridge

        self.version, self._folder = mcore_bridge.__version__, folder

    def build(self, depths: int | None, *hooks: Hook) -> Any:
        from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from transformers import AutoConfig

        found = AutoConfig.from_pretrained(self._folder)
        fields = hf_to_mcore_config(found)
        config = ModelConfig(**{**fields, **OFF, "mtp_num_layers": depths})
        chunks = get_mcore_model(config)
        config.bridge.load_weights(chunks, str(self._folder))
        for hook in hooks:
            chunks = hook(chunks)
        return DistributedDataParallel(config, DistributedDataParallelConfig(), chunks[0])

    def lora(self, _: str, attaching: Hook | None) -> list[Hook]:
        """The patch of ms-swift attaches after PEFT, which targets all linear layers."""
        from peft import LoraConfig, get_peft_model

        targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "eh_proj"]

        def adapting(chunks: Any) -> Any:
            for chunk in chunks:
                get_peft_model(chunk, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets))
            return chunks

        return [adapting] if attaching is None else [adapting, attaching]

    def export(self, model: Any) -> list[tuple[str, Tensor]]:
        from mcore_bridge.tuners import LoraParallelLinear

        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, LoraParallelLinear):
                    module.merge()
        return list(model.module.config.bridge.export_weights([model.module]))


BUILDERS: dict[str, Any] = {"megatron_bridge": Bridge, "ms_swift": McoreBridge}


# --- steps ------------------------------------------------------------------------------------------------------------


def batches_of(corpus: Path) -> list[dict[str, Tensor]]:
    """Return the rows of `megatron-mtp train`, read with Megatron's dataset."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=([str(corpus)], None),
        split=SPLIT,
        tokenizer=SimpleNamespace(vocab_size=VOCABULARY, eod=VOCABULARY, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    rows, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [STEPS * ROWS, ROWS, 0], lambda: True, config).build()
    samples = [rows[number] for number in range(STEPS * ROWS)]
    return [
        {name: torch.stack([sample[name] for sample in samples[first : first + ROWS]]) for name in ("tokens", "labels")}
        for first in range(0, len(samples), ROWS)
    ]


def gradients(model: Any, batch: dict[str, Tensor], policy: bool) -> dict[str, Tensor]:
    """Return gradients of one step of Megatron's schedule: of a policy, whose forward pass gets no labels, or of
    fine-tuning.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    destroy_moe_metrics_tracker()  # it has a slot for each layer of the first model
    advantage = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]])

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        if not policy:
            return output.mean(), {"loss": output.detach().mean()}
        logp = output[:, :-1].float().log_softmax(-1).gather(-1, batch["tokens"][:, 1:, None])[..., 0]
        return -(advantage * logp).mean(), {}

    def forward_step(_: Any, model: Any) -> Any:
        labels = {} if policy else {"labels": batch["labels"]}
        return model(batch["tokens"], POSITIONS, None, **labels), loss_of

    model.config.finalize_model_grads_func = finalize_model_grads
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
    return {name: each.main_grad.clone() for name, each in model.module.named_parameters() if each.requires_grad}


def optimizer_of(model: Any, rate: float = RATE) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from megatron_mtp.training.parameter_group import get_mtp_optimizer

    config = OptimizerConfig(optimizer="adam", lr=rate, weight_decay=0.0, adam_beta2=0.999, clip_grad=1.0)
    return get_mtp_optimizer(config, [model], lr=rate, clip_grad=1.0)


def attaching(depths: int | None = 1, weight: float = WEIGHT, **settings: Any) -> Hook:
    """Return a hook like the one in integrations/README.md."""
    from megatron_mtp.attach import Head, attach
    from megatron_mtp.spec.config import MTPConfig

    heads = [Head(MTPConfig(**settings), depths)]
    return lambda chunks: attach(chunks, heads=heads, weight=weight) and chunks


def layers_loss(model: Any) -> float:
    """Return the loss of the last forward pass."""
    from megatron_mtp.model.attachment import attached_of

    loss: float = attached_of(model.module).last.depth_means[0].item()  # type: ignore[attr-defined]
    return loss


def beside(plain: Any, model: Any, batches: list[dict[str, Tensor]], policy: bool, rate: float) -> dict[str, Any]:
    """Compare steps of a model with and without layers.

    Return what differs, the number of the layers' parameters with a gradient, and the layers' first and last loss.
    """
    optimizers = optimizer_of(plain, rate), optimizer_of(model, rate)
    differ, learned, losses = set(), set(), []
    for batch in batches:
        expected, found = (gradients(one, batch, policy) for one in (plain, model))
        differ |= {name for name, value in expected.items() if not torch.equal(found[name], value)}
        learned |= {name for name, value in found.items() if name not in expected and value.any()}
        losses.append(layers_loss(model))
        for one in optimizers:
            one.step()
            one.zero_grad()
    weights = dict(model.module.named_parameters())
    differ |= {f"weight of {n}" for n, each in plain.module.named_parameters() if not torch.equal(each, weights[n])}
    return {"differ": sorted(differ), "learned": len(learned), "losses": [losses[0], losses[-1]]}


# --- jobs -------------------------------------------------------------------------------------------------------------


def tune(made: Any, folder: Path, batches: list[dict[str, Tensor]], out: Path, head: str) -> dict[str, Any]:
    """Take three policy steps with and without layers, then fine-tune a whole model.

    OUT/start and OUT/tuned hold the fine-tuned model before and after.
    """
    own = 1 if head == "own" or made.builds_layers else None
    plain, policy = made.build(None), made.build(own, attaching(mtp_train_only=True, mtp_loss="kd"))
    record = beside(plain, policy, batches[:POLICY_STEPS], policy=True, rate=RATE)
    record["lost without"] = not any("eh_proj" in name for name, _ in made.export(plain))
    model = made.build(own, attaching())
    exported(made, model, folder, head, out / "start")
    optimizer, losses = optimizer_of(model), []
    for batch in batches:
        gradients(model, batch, policy=False)
        losses.append(layers_loss(model))
        optimizer.step()
        optimizer.zero_grad()
    return record | {"losses": [losses[0], losses[-1]]} | exported(made, model, folder, head, out / "tuned")


def lora(made: Any, folder: Path, batches: list[dict[str, Tensor]], out: Path, head: str) -> dict[str, Any]:
    """Train LoRA on the trunk with and without layers, from the same adapters.

    OUT/kept and OUT/lost hold the merged models; the folder's format has names for layers.
    """
    own = 1 if head == "own" or made.builds_layers else None
    plain = made.build(None, *made.lora(head, None))
    model = made.build(own, *made.lora(head, attaching(mtp_train_only=True)))
    weights = dict(model.module.named_parameters())
    with torch.no_grad():
        for name, each in plain.module.named_parameters():
            weights[name].copy_(each)
    record = beside(plain, model, batches, policy=False, rate=LORA_RATE)
    lost, kept = dict(made.export(plain)), dict(made.export(model))
    config = json.loads((folder / "config.json").read_text())  # frameworks keep the number of layers
    write(lost, config, out / "lost")
    write(kept, config, out / "kept")
    record["lost"] = sorted(kept.keys() - lost.keys())
    record["changed"] = [name for name, value in lost.items() if not torch.equal(kept[name], value)]
    return record


def drafter(made: Any, folder: Path, batches: list[dict[str, Tensor]], out: Path, head: str) -> dict[str, Any]:
    """Fine-tune with and without a drafter of the kind `head`; OUT/drafter is its folder."""
    from megatron_mtp.checkpoint.convert.live_drafter import export_drafter

    hook = attaching(None, 1.0, drafter=head, drafter_steps=3, drafter_layers=(1, 2, 3))
    plain, model = made.build(None), made.build(None, hook)
    record = beside(plain, model, batches, policy=False, rate=RATE)
    export_drafter(model, out / "drafter")
    write(dict(made.export(plain)), json.loads((folder / "config.json").read_text()), out / "trunk")
    return record


JOBS = {"tune": tune, "lora": lora, "drafter": drafter}


def exported(made: Any, model: Any, folder: Path, head: str, out: Path) -> dict[str, Any]:
    """Write a folder that drafts, and return which side exported the layers.

    The framework exports them; if it has no names for layers, this package does, in the format of a family that has.
    Tensors exported by both are compared.
    """
    from megatron_mtp.checkpoint.convert.hf_form import form_of
    from megatron_mtp.checkpoint.convert.import_hf import megatron_arguments
    from megatron_mtp.checkpoint.convert.live import LiveReader, export_hf_weights
    from megatron_mtp.checkpoint.convert.plan import HFModel

    tensors, config = {}, json.loads((folder / "config.json").read_text())
    if head == "own" or made.builds_layers:  # otherwise Bridge's export fails at the layers
        tensors = dict(made.export(model))
    has_names = "num_nextn_predict_layers" in config and any("eh_proj" in name for name in tensors)
    if head == "own":
        ours = dict(export_hf_weights(model, like=folder, only_mtp=True))
    else:
        args = megatron_arguments(HFModel.read(folder))
        ours = dict(export_hf_weights(model, args))
        config = (
            config | {"num_nextn_predict_layers": 1} if has_names else dict(form_of(LiveReader([model], args)).keys)
        )
    write(tensors if has_names else ours, config, out)
    unequal = [name for name, value in ours.items() if name in tensors and not torch.equal(value, tensors[name])]
    by = made.name if has_names else "export_hf_weights"
    return {"exported by": by, "unequal": unequal if has_names else []}


def write(tensors: dict[str, Tensor], config: dict[str, Any], out: Path) -> None:
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: each.detach().clone().contiguous() for name, each in tensors.items()}, out / "model.safetensors")


def main(framework: str) -> None:
    te_names.install()
    import_module(BUILDERS[framework].module)  # before the CPU stand-ins
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a fork would lack {threads - 1} threads of this process"
    for_each_job(partial(record_of, framework))


def record_of(framework: str, job: str, folder: str, corpus: str, out: str, head: str) -> dict[str, Any]:
    torch.manual_seed(0)
    made = BUILDERS[framework](Path(folder))
    from megatron_mtp.megatron import cpu

    cpu.install()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(1)
    model_parallel_cuda_manual_seed(3)
    record = JOBS[job](made, Path(folder), batches_of(Path(corpus)), Path(out), head)
    return {"framework": made.name, "version": made.version, **record}


if __name__ == "__main__":
    main(sys.argv[1])
