"""A tied model with MTP layers on a later pipeline stage can be saved: its embedding is the only copy there (gloo)."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
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


def run(rank, port, tied):
    """Compare the keys of the last stage's checkpoint with those of its weights."""
    if not torch.cuda.is_available():
        without_cuda()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
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
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    saved = model.sharded_state_dict()
    assert "embedding.word_embeddings.weight" in saved
    if rank == 1:
        assert ("output_layer.weight" in saved) == (not tied)
        assert ("output_layer.weight" in dict(model.named_parameters())) == (not tied)
        copy = saved["embedding.word_embeddings.weight"]
        assert copy.key == "embedding.word_embeddings.weight"
        assert copy.replica_id != (0, 0, 0)  # the first stage saves it
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_stage_is_saved(tied):
    """With a tied output layer, and unchanged with an untied one."""
    mp.spawn(run, args=(29521 + tied, tied), nprocs=2)
