"""The position embeddings of the MTP layers' pipeline stage match those of the first stage (gloo).

Two stages have a copy each: they start equal, learn from the sum of their gradients, and are saved once.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_config import TransformerConfig


def without_cuda():
    """Let a model be built on the CPU, without Transformer Engine."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    multi_token_prediction.is_inference_column_parallel_linear = lambda *args: False


def built(rank, positions):
    """Build this rank's stage."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        mtp_num_layers=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        transformer_impl="local",
    )
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        vocab_size=16,
        max_sequence_length=8,
        pre_process=rank == 0,
        post_process=rank == 1,
        position_embedding_type=positions,
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    model.ddp_config, model.finish_grad_sync = SimpleNamespace(use_megatron_fsdp=False), lambda **_: None
    return model


def run(rank, port, positions):
    """Compare the two stages."""
    if not torch.cuda.is_available():
        without_cuda()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(rank)
    torch.manual_seed(rank)
    model, key = built(rank, positions), "embedding.position_embeddings.weight"
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    finalize_model_grads([model])
    torch.testing.assert_close(model.embedding.word_embeddings.weight.grad, torch.full((16, 8), 3.0))
    found = dict(model.named_parameters())
    assert (key in found) == (positions == "learned_absolute")
    if key in found:
        first = found[key].detach().clone()
        dist.broadcast(first, 0)
        torch.testing.assert_close(found[key].detach(), first)
        torch.testing.assert_close(found[key].grad, torch.full((8, 8), 3.0))
        is_copy = model.sharded_state_dict()[key].replica_id != (0, 0, 0)
        assert is_copy == getattr(found[key], "shared", False) == (rank == 1)  # saved, and counted in norms, once
    dist.destroy_process_group()


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_copies_are_equal(positions):
    """With learned positions, and unchanged without them."""
    mp.start_processes(run, args=(29551 + (positions == "rope"), positions), nprocs=2, start_method="fork")
