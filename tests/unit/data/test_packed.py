"""A packed row gives the same losses of trunk and MTP layers, and all gradients, as its documents one by one."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_single import (
    LATENT,
    MOE,
    VOCABULARY,
    gradients,
    objective,
    our_model,
)
from torch import Tensor

from megatron_mtp.data.batch import depth_batch, documents_from_offsets
from megatron_mtp.losses.objective import ObjectiveOutput

pytestmark = pytest.mark.usefixtures("megatron")

SHARED = {"mtp_use_repeated_layer": True, "shares_kv": True}
FIRST_PASS = {"mtp_use_repeated_layer": True, "first_pass_kv": True}
KINDS = {
    **{"dense": {}, "experts": MOE, "latent attention": LATENT, "shared keys": SHARED},
    "latents of pass 1": {**LATENT, **FIRST_PASS},
}
DEPTHS = 3


@dataclass(frozen=True)
class Pack:
    """Documents, and the slots that each occupies."""

    lengths: list[int]
    held: list[int]

    @property
    def slots(self) -> int:
        return sum(self.held)

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.held, initial=0))[:-1]

    def offsets(self, sizes: list[int]) -> Tensor:
        return torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32).cuda()


PACKS = {
    "ends at the last slot": Pack([5, 1, 7, 2], [5, 1, 7, 2]),
    "padded": Pack([5, 1, 7, 3], [8, 4, 8, 3]),
    "documents of one token": Pack([1] * 6, [1] * 6),
    "one document": Pack([11], [11]),
}


def row_of(pack: Pack) -> dict[str, Any]:
    """Return a row of random tokens; padding and some tokens are masked."""
    generator = torch.Generator().manual_seed(6)
    tokens, labels = torch.randint(1, VOCABULARY, (2, 1, pack.slots), generator=generator)
    mask = torch.zeros(1, pack.slots)
    for start, length in zip(pack.starts, pack.lengths, strict=True):
        mask[:, start : start + length] = (torch.rand(1, length, generator=generator) > 0.15).float()
    return {"tokens": tokens.cuda(), "labels": labels.cuda(), "loss_mask": mask.cuda()}


def outputs(
    model: GPTModel, batch: dict[str, Any], packed: PackedSeqParams | None, document_BS: Tensor | None = None
) -> ObjectiveOutput:
    position_ids = torch.zeros_like(batch["tokens"])  # RoPE ignores them
    return model(
        batch["tokens"],
        position_ids,
        None,
        labels=batch["labels"],
        packed_seq_params=packed,
        output_processor=objective(model, per_token=True),
        output_processor_context=[depth_batch(batch, DEPTHS, document_BS)],
    )


def of_pack(model: GPTModel, pack: Pack) -> ObjectiveOutput:
    batch, real, held = row_of(pack), pack.offsets(pack.lengths), pack.offsets(pack.held)
    packed = PackedSeqParams("thd", held, held, held, held, max_seqlen_q=max(pack.held), max_seqlen_kv=max(pack.held))
    return outputs(model, batch, packed, documents_from_offsets(real[None], held[None], pack.slots))


def of_documents(model: GPTModel, pack: Pack) -> list[ObjectiveOutput]:
    row = row_of(pack)
    found = []
    for start, length in zip(pack.starts, pack.lengths, strict=True):
        batch = {name: value[:, start : start + length] for name, value in row.items()}
        found.append(outputs(model, batch, None))
    return found


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_packed_row_is_its_documents(kind: dict[str, Any], pack: Pack) -> None:
    model = our_model(DEPTHS, **kind)
    packed, single = of_pack(model, pack), of_documents(model, pack)
    for index in range(DEPTHS + 1):
        ours = (packed.main, *packed.heads[0].depths)[index]
        alone = [(output.main, *output.heads[0].depths)[index] for output in single]
        torch.testing.assert_close(ours.total, torch.stack([one.total for one in alone]).sum(), rtol=1e-5, atol=1e-6)
        assert ours.tokens == sum(one.tokens for one in alone)
    packed.loss.backward()
    of_packed = gradients(model)
    model.zero_grad()
    torch.stack([output.loss for output in single]).sum().backward()
    of_single = gradients(model)
    # A lone token attends to itself, whatever queries and keys are, so their gradients are rounding errors.
    rounding = torch.finfo(torch.float32).eps * max(gradient.abs().max() for gradient in of_single.values())
    for name, expected in of_single.items():
        allowed = 1e-5 * expected.abs().max() + rounding
        assert (of_packed[name] - expected).abs().max() <= allowed, name
