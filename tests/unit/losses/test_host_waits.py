"""A training step never waits for the GPU to read what the host knows: no waits in losses, counts and packed rows."""

from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import test_objective
import torch
from megatron.training import training
from pretended_cuda import OnCuda, on_cuda, pretended_cuda

from megatron_mtp.losses import linear_cross_entropy
from megatron_mtp.losses.acceptance import measured
from megatron_mtp.losses.objective import kept_positions
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.packed_rows import bounds_of
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training import forward_step, reading_stages

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("name", ["ce", "kd", "tv", "e2e_tv"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_losses_do_not_wait(name: str, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"depth_loss": depth_loss(MTPConfig(mtp_loss=name)), "linear_main": True}
    settings["kept_positions"] = partial(kept_positions, fraction, (1, 2))
    with monkeypatch.context() as as_on_cuda:
        as_on_cuda.setattr(linear_cross_entropy, "_counted", lambda _: None)  # compute all positions
        plain = test_objective.outcome(**settings)
    with pretended_cuda() as waits:
        leaves, batch = test_objective.states(), test_objective.batch()
        monkeypatch.setattr(test_objective, "batch", lambda: batch)
        waits.clear()
        made = test_objective.outcome_of(leaves, **settings)
        made.loss.backward()
        assert not waits
        assert isinstance(leaves[1][0].grad, OnCuda)
        assert made.loss.cpu().item() == plain.loss.item()


def test_acceptance_does_not_wait() -> None:
    plain = test_objective.outcome(measure=measured)
    with pretended_cuda() as waits:
        leaves, batch = test_objective.states(), test_objective.batch()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_objective, "batch", lambda: batch)
            waits.clear()
            made = test_objective.outcome_of(leaves, measure=measured)
        assert not waits
        found, expected = made.heads[0].acceptance, plain.heads[0].acceptance
        assert found is not None
        assert expected is not None
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_packed_rows_do_not_wait(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of eight positions; Megatron's loader has its tensors on the host."""
    args = Namespace(
        micro_batch_size=2, eval_micro_batch_size=2, seq_length=8, create_attention_mask_in_dataloader=False,
        pipeline_model_parallel_size=1, reset_attention_mask=False, eod_mask_loss=False, hybrid_layer_pattern=None,
        dataloader_inter_document_masking=True, reads_chats=False, mtp_num_layers=2,
    )  # fmt: skip
    for module in (forward_step, reading_stages):
        monkeypatch.setattr(module, "get_args", lambda: args)
    monkeypatch.setattr(forward_step, "reads_everything", lambda _: True)
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    rows_BS = torch.arange(16).view(2, 8)
    offsets = torch.tensor([[0, 3, 8, 8], [0, 4, 5, 8]], dtype=torch.int32)
    loaded = {"tokens": rows_BS, "labels": rows_BS + 1, "loss_mask": torch.ones(2, 8), "position_ids": rows_BS % 8}
    loaded |= {"cu_seqlens": offsets, "max_seqlen": torch.tensor([5, 4])}
    if padded:
        loaded |= {
            "cu_seqlens": torch.tensor([[0, 2, 6, 6], [0, 3, 4, 7]], dtype=torch.int32),
            "cu_seqlens_padded": offsets,
        }
    with pretended_cuda() as waits:
        batch, depths = forward_step.get_batch(iter([loaded]), None, 2)
        packed = forward_step.packed_seq_params(batch)
        assert not waits
        assert packed is not None
        assert depths is not None
        assert isinstance(packed.cu_seqlens_q, OnCuda)
        assert bounds_of(packed).tolist() == [0, 3, 8, 12, 13, 16] == packed.cu_seqlens_q.tolist()
        assert (packed.max_seqlen_q, packed.cu_seqlens_q_padded is not None) == (5, padded)


def test_host_device_synchronization_is_detected() -> None:
    with pretended_cuda() as waits:
        values = on_cuda(torch.arange(4.0))
        values.new_tensor([1.0, 2.0]), values.sum().item(), values[values > 1], values[torch.tensor([1])], values.cpu()
        torch.ones(2).to(values.device)
    assert set(waits) == {
        "new_tensor", "_local_scalar_dense", "index", "index of the host", "cpu", "copy from the host"
    }  # fmt: skip
    with pretended_cuda(), pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        on_cuda(torch.ones(2)) + torch.ones(2)
