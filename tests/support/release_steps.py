"""Train attached MTP layers on a stock GPT for two steps, with the first megatron-core on the path; one process, CPU.

    PYTHONPATH=REPOSITORY:REPOSITORY/tests/support python tests/support/release_steps.py

A job is [FOLDER], the folder of a release, or "" for the installed one. A fork per job imports Megatron and prints the
version and the MTP losses.
"""

import sys
import warnings
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # cpu.install needs it
from job_forks import for_each_job

warnings.filterwarnings("ignore")
VOCABULARY, LENGTH, ROWS = 32, 8, 2


def on_cpu() -> None:
    """Apply the substitutions of `megatron_mtp.megatron.cpu`; a release may lack `megatron.training`."""
    from megatron_mtp.megatron import cpu

    stand_in = ModuleType("megatron.training")
    stand_in.training = ModuleType("megatron.training.training")  # type: ignore[attr-defined]
    sys.modules |= {stand_in.__name__: stand_in, "transformer_engine": None}  # type: ignore[dict-item]
    cpu.install()
    del sys.modules[stand_in.__name__]


def steps(folder: str) -> dict[str, Any]:
    sys.path[:0] = [folder] if folder else []
    on_cpu()
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_mtp.attach import attach

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        transformer_impl="local",
    )
    layers = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope")
    attached = attach(model, depths=2)
    torch.manual_seed(5)
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) / 5 if weight.dim() > 1 else torch.ones_like(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens_BS = torch.randint(VOCABULARY, (ROWS, LENGTH))
    positions_BS = torch.arange(LENGTH).expand(ROWS, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    losses = []
    for _ in range(2):
        model(tokens_BS, positions_BS, mask)
        made = attached.loss(tokens_BS, None, torch.ones(ROWS, LENGTH))
        optimizer.zero_grad()
        made.loss.backward()
        optimizer.step()
        losses.append(made.loss.item())
    assert "megatron.training" not in sys.modules
    return {"version": megatron.core.__version__, "losses": losses}


if __name__ == "__main__":
    assert not any(name.startswith("megatron.") for name in sys.modules)
    for_each_job(steps)
