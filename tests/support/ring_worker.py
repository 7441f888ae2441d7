"""One context-parallel rank: compare drafters with ring attention to drafters that gather keys, in float64.

    torchrun --nproc-per-node 4 ring_worker.py FILE "eagle3 packed" "dspark rows" ..

For every case, rank 0 writes to FILE the names of tensors that differ; test_ring_ranks.py reads it. A case is a kind of
drafter, the format of its batch, and more words: those in `CHANGES` change the drafter, and `latent` selects a trunk
with latent attention.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from attached_worker import gather
from drafter_settings import LAYERS, settings_of
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_single import VOCABULARY, relative_difference
from stock_models import chunks, draw
from torch import Tensor

from megatron_mtp.attach import Head, attach
from megatron_mtp.losses.stage_loss import own_positions
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model import attention, ring

prepare()

ROUNDING = 1e-12
OFFSETS = [0, 8, 32, 48]
"""Document offsets that four ranks can split into eight parts each."""

CHANGES: dict[str, dict[str, Any]] = {
    "window": {"drafter_window_size": 3},
    "sinks": {"drafter_softmax_type": "learnable"},
    "blocks": {"drafter_blocks": 6},
}


def compare(cases: list[str]) -> dict[str, list[str]]:
    """Return what differs between both ways on any rank, for every case."""
    found = {}
    for case in cases:
        kind, form, *words = case.split()
        changes = {name: value for word in words for name, value in CHANGES.get(word, {}).items()}
        ranks = {"context_parallel_size": torch.distributed.get_world_size()}
        model = chunks("latent" if "latent" in words else "dense", **LAYERS, **ranks)[0]
        attached = attach(model, heads=[Head(settings_of(kind, **changes))])
        model.double()
        draw(model)
        made = {}
        for least in (sys.maxsize, 0):
            attention.RING_FROM = least
            model.zero_grad(set_to_none=True)
            made[least] = loss_and_gradients(model, attached, form)
        expected, by_ring = made.values()
        assert expected.keys() == by_ring.keys() > {"loss"}
        differ = [name for name, each in expected.items() if relative_difference(by_ring[name], each) > ROUNDING]
        found[case] = sorted({name for names in gather(differ) for name in names})
    return found


def loss_and_gradients(model: Any, attached: Any, form: str) -> dict[str, Tensor]:
    """Return the loss and gradients of all context-parallel ranks."""
    generator = torch.Generator().manual_seed(3)
    rows = 1 if form == "packed" else 2
    tokens_BS = torch.randint(VOCABULARY - 1, (rows, OFFSETS[-1]), generator=generator)
    mask_BS = (torch.rand(tokens_BS.shape, generator=generator) < 0.8).float()
    packed = None
    if form == "packed":
        offsets = torch.tensor(OFFSETS, dtype=torch.int32)
        longest = int(offsets.diff().max())
        packed = PackedSeqParams("thd", offsets, offsets, None, None, longest, longest)
    group = mpu.get_context_parallel_group()
    own_S = own_positions(group, tokens_BS.size(1), packed)
    attached._losses = 0  # so that both draw the same blocks
    model(tokens_BS[:, own_S], own_S.expand(rows, -1), None, packed_seq_params=packed)
    loss = attached.loss(tokens_BS, None, mask_BS).loss
    loss.backward()
    made = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    made["loss"] = loss.detach()
    for each in made.values():
        torch.distributed.all_reduce(each, group=group)
    return made


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(context_parallel_size=torch.distributed.get_world_size())
    model_parallel_cuda_manual_seed(0)
    ring.TILE = 5  # small tiles, so that some are fully masked
    result = compare(sys.argv[2:])
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
