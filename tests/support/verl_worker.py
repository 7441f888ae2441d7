"""Run verl's Megatron engine on a CPU: three policy gradient steps with its `train_batch`.

    PYTHONPATH=VERL:MEGATRON_BRIDGE:REPOSITORY python tests/support/verl_worker.py FOLDER OUT

VERL is the release, patched or not, and FOLDER a tiny model. The engine is built, loads the folder, and takes packed
rows of several lengths in two microbatches, as in verl's workers. OUT is a safetensors file: the initial weights;
log-probabilities, gradients and weights of every step; and the weights finally sent to rollout engines. Cluster
packages that verl imports have stand-ins (AWAY).
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import te_names
import torch
from safetensors.torch import save_file
from torch import Tensor

AWAY = ("ray", "datasets", "peft", "flash_attn", "torch_npu", "transfer_queue", "megatron.energon")
FUSIONS = (
    *("gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("apply_rope_fusion", "cross_entropy_loss_fusion", "moe_permute_fusion", "moe_router_fusion"),
)
"""Fusions that need CUDA."""

LENGTHS, PROMPT, VOCABULARY, STEPS = (12, 9, 16, 7), 4, 96, 3


class Away(MetaPathFinder, Loader):
    """Provide modules that nothing here calls."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_away = any(f"{name}.".startswith(f"{each}.") for each in AWAY)
        return ModuleSpec(name, self, is_package=True) if is_away else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__name__=spec.name, __spec__=spec, __path__=[], __version__="99")

    def exec_module(self, module: Any) -> None: ...


def batch_of(step: int) -> Any:
    """Return rows of several lengths without padding, as verl's trainer creates them."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    drawn = torch.Generator().manual_seed(step)
    rows = [torch.randint(VOCABULARY, (length,), generator=drawn) for length in LENGTHS]
    masks = [(torch.arange(length) >= PROMPT).float() for length in LENGTHS]
    nested = {"input_ids": rows, "loss_mask": masks}
    tensors = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in nested.items()}
    data = TensorDict(tensors | {"temperature": torch.ones(len(rows))}, batch_size=len(rows))
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    return data


def main(folder: Path, out: Path) -> None:
    te_names.install()
    sys.meta_path.insert(0, Away())
    import megatron.bridge  # noqa: F401  # before the CPU stand-ins

    from megatron_mtp.megatron import cpu

    cpu.install()
    torch.cuda.mem_get_info = lambda *_: (0, 0)  # verl prints it
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core.utils import unwrap_model
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    override = {"attn_implementation": "eager"}
    model_config = HFModelConfig(path=str(folder), load_tokenizer=False, override_config=override)
    model_config.tokenizer = SimpleNamespace(pad_token_id=0)
    engine = MegatronEngineWithLMHead(
        model_config,
        McoreEngineConfig(override_transformer_config=dict.fromkeys(FUSIONS, False)),
        McoreOptimizerConfig(lr=1e-2, clip_grad=0.0, total_training_steps=STEPS),
        CheckpointConfig(),
    )
    engine.initialize()
    model = unwrap_model(engine.module[0])
    found = {f"start of {name}": each.detach().clone() for name, each in model.named_parameters()}
    order = count()

    def loss_of(model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        logprobs = model_output["log_probs"].values()
        found[f"log-probabilities {next(order)}"] = logprobs.detach().clone()
        return -(logprobs * data["loss_mask"].values()).mean(), {}

    with engine.train_mode():
        for step in range(STEPS):
            engine.train_batch(batch_of(step), loss_of)
            for name, each in model.named_parameters():
                found[f"gradient {step} of {name}"] = each.main_grad.clone()
                found[f"weight {step} of {name}"] = each.detach().clone()
    sent, _ = engine.get_per_tensor_param()
    found |= {f"sent {name}": each.clone().contiguous() for name, each in sent}
    save_file(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
