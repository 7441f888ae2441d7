"""The MTP loss under context parallelism is one mean over all tokens, even if ranks have uneven counts (gloo).

Two ranks hold a packed row of one document of 8 slots: rank 0 slots 0 1 6 7, rank 1 slots 2 3 4 5. The loss mask covers
slots 1 to 3 and 7, so the ranks have different numbers of targets. Gradients match those of one process.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import process_mtp_loss

SLOTS = ([0, 1, 6, 7], [2, 3, 4, 5])
LENGTH, HIDDEN, VOCAB = 8, 4, 11


def gradient(own, cp_group, per_token):
    """Return d(MTP loss) / d(hidden states of the MTP layer) at this rank's slots, as the optimizer sees it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    states = torch.randn(LENGTH, 1, HIDDEN, generator=generator)[own].requires_grad_()
    labels = torch.randint(VOCAB, (1, LENGTH), generator=generator)[:, own]
    mask = torch.tensor([[0.0, 1, 1, 1, 0, 0, 0, 1]])[:, own]
    offsets = torch.tensor([0, LENGTH], dtype=torch.int32)
    config = SimpleNamespace(
        mtp_num_layers=1, mtp_loss_scaling_factor=1.0, calculate_per_token_loss=per_token, mtp_detach_heads=False
    )

    def output_layer(hidden, weight=weight, runtime_gather_output=None):
        return hidden @ weight.t(), None

    def cross_entropy(labels, logits):
        return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")

    output = process_mtp_loss(
        hidden_states=torch.cat([states.detach(), states]),
        labels=labels,
        loss_mask=mask,
        output_layer=output_layer,
        output_weight=weight,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=cross_entropy,
        config=config,
        cp_group=cp_group,
        packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets),
    )
    (output.sum() * 0).backward()
    return states.grad


def run(rank, port, per_token):
    """Compare a rank's gradient with its part of a single process's."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    own = SLOTS[rank]
    # Finalizing divides the sum over ranks by their number, or for per-token losses by the tokens of all ranks.
    found = gradient(own, dist.group.WORLD, per_token) / (1 if per_token else 2)
    expected = gradient(list(range(LENGTH)), None, per_token)[own]
    torch.testing.assert_close(found, expected)
    dist.destroy_process_group()


@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_are_those_of_one_process(per_token):
    """With a mean over the microbatch, and with sums divided by the tokens of all ranks."""
    mp.spawn(run, args=(29511 + per_token, per_token), nprocs=2)
