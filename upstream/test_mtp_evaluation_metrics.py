"""Evaluations log MTP losses and acceptance rates, without affecting those of training (gloo).

Two data-parallel ranks evaluate different rows with `evaluate` of megatron/training: the numbers match what training
logs for the same rows and weights.
"""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, process_mtp_loss
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import training

LENGTH, HIDDEN, VOCAB, MICROBATCHES, ITERATIONS = 8, 4, 6, 2, 3
NAMES = ("mtp_1 loss", "mtp_1_acceptance_rate", "mtp_2 loss", "mtp_2_acceptance_rate")


def on_cpu(make, *args, device=None, **kwargs):
    """Return the tensor on the CPU, whatever device is requested."""
    return make(*args, **kwargs)


def without_cuda():
    """Let metric tensors be on the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.tensor, torch.zeros = partial(on_cpu, torch.tensor), partial(on_cpu, torch.zeros)


class Model(torch.nn.Module):
    """Embeddings instead of the trunk and two MTP layers, and an output layer."""

    pg_collection, model_type = None, ModelType.encoder_or_decoder

    def __init__(self):
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, mtp_num_layers=2, use_cpu_initialization=True
        )
        generator = torch.Generator().manual_seed(0)
        self.layers, self.output = (
            torch.nn.Parameter(torch.randn(*shape, generator=generator))
            for shape in ((3, VOCAB, HIDDEN), (VOCAB, HIDDEN))
        )

    def set_input_tensor(self, tensor):
        """There are no other pipeline stages."""

    def forward(self, tokens, labels, mask):
        """Return the losses of the trunk [1, S]."""

        def losses_of(labels, logits):
            return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")

        def output_layer(hidden, weight=None, runtime_gather_output=None):
            return hidden @ self.output.t(), None

        states = torch.cat([layer[tokens].transpose(0, 1) for layer in self.layers])
        trunk = process_mtp_loss(
            hidden_states=states,
            labels=labels,
            loss_mask=mask,
            output_layer=output_layer,
            output_weight=None,
            runtime_gather_output=True,
            is_training=self.training,
            compute_language_model_loss=losses_of,
            config=self.config,
        )
        return losses_of(labels, output_layer(trunk)[0])


def forward_step(rows, model):
    """Return a row of tokens with its labels, some of which are masked."""
    text, mask = next(rows)
    losses = model(text[:, :-1], text[:, 1:], mask)
    return losses, lambda losses: (losses.sum(), {"lm loss": torch.stack([(losses * mask).sum(), mask.sum()])})


def rows(rank):
    """Return microbatches of a rank."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(MICROBATCHES * ITERATIONS):
        text = torch.randint(VOCAB, (1, LENGTH + 1), generator=generator)
        yield text, (torch.rand(1, LENGTH, generator=generator) < 0.7).float()


def args():
    """Return the arguments that `evaluate` reads."""
    return mock.MagicMock(
        eval_global_batch_size=2 * MICROBATCHES,
        eval_micro_batch_size=1,
        data_parallel_size=2,
        gtp_weight_remat_size=1,
        cuda_graph_impl="none",
        moe_expert_rank_capacity_factor=None,
        modelopt_enabled=False,
        seq_length=LENGTH,
        empty_unused_memory_level=0,
        sft=False,
        consumed_valid_samples=0,
        exit_duration_in_mins=None,
    )


def run(rank, port):
    """Compare an evaluation with what training logs."""
    if not torch.cuda.is_available():
        without_cuda()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    model, logged = Model().train(), {}
    for row in rows(rank):
        forward_step(iter([row]), model)
    writer = mock.Mock(add_scalar=lambda name, value, iteration: logged.update({name: float(value)}))
    MTPLossLoggingHelper.track_mtp_metrics(1 / (MICROBATCHES * ITERATIONS), 1, writer)

    forward_step(rows(rank), model)  # training has not logged this microbatch yet
    kept = MTPLossLoggingHelper.tracker["loss_values"].clone()
    stubs = {name: mock.MagicMock() for name in ("get_timers", "get_rerun_state_machine", "ft_integration")}
    with mock.patch.multiple(training, get_args=args, **stubs):
        found, _, _ = training.evaluate(forward_step, rows(rank), [model], None, model.config, eval_iters=ITERATIONS)
    assert set(found) == {"lm loss", *NAMES}
    for name in NAMES:
        assert float(found[name]) == pytest.approx(logged[name], rel=1e-5)
    torch.testing.assert_close(MTPLossLoggingHelper.tracker["loss_values"], kept)
    dist.destroy_process_group()


def test_an_evaluation_logs_what_training_does():
    """On the same rows, with the same weights."""
    mp.start_processes(run, args=(29541,), nprocs=2, start_method="fork")  # megatron.training is imported once
