"""Drafters of every kind for stock models of four layers, and the gradients of the stage that `train` builds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron_single import VOCABULARY, make_batch, one_head
from stock_models import draw, learned, packed_batch, stock
from torch import Tensor

from megatron_mtp.attach import Head
from megatron_mtp.data.batch import depth_batch
from megatron_mtp.losses.head_objective import base_share, depth_weights
from megatron_mtp.losses.stage_loss import HALFWAY, _documents
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.spec.config import MTPConfig

STEPS = 3
LAYERS: dict[str, Any] = {"num_layers": 4}
DRAFTED = [*range(1, VOCABULARY // 2, 2), VOCABULARY - 3, VOCABULARY - 2]
"""A draft vocabulary of which two tensor-parallel ranks hold unequal parts."""
BLOCKS: dict[str, Any] = {"drafter_num_layers": 2, "drafter_mask_token": 7}
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"drafter_layers": (1, 2, 3)},
    "dflash": {"drafter_layers": (1, 3), **BLOCKS},
    "dspark": {"drafter_layers": (1, 3), **BLOCKS, "drafter_markov_rank": 6},
    "dflash2": {"drafter_layers": (1, 3), **BLOCKS, "drafter_markov_rank": 6},
    "domino": {"drafter_layers": (1, 3), **BLOCKS, "drafter_markov_rank": 6, "drafter_gru_size": 10},
    "peagle": {"drafter_layers": (1, 2, 3), **BLOCKS},
}


def settings_of(kind: str, **others: Any) -> MTPConfig:
    return MTPConfig(drafter=kind, drafter_steps=STEPS, **SETTINGS[kind], **others)


def several_heads(vocabulary: Path | None = None) -> list[Head]:
    """Return MTP layers and two drafters, with weights that are powers of two, so that gradients scale exactly.

    Args:
        vocabulary: file with `DRAFTED`, the draft vocabulary of EAGLE-3.
    """
    return [
        Head(settings_of("dspark"), weight=0.5),
        Head(MTPConfig(mtp_loss="kd", mtp_train_only=True, mtp_hidden_state_mixing=True), 2, weight=2.0),
        Head(settings_of("eagle3", mtp_draft_vocab_file=None if vocabulary is None else str(vocabulary))),
    ]


def vocabulary_in(folder: Path) -> Path:
    """Write a file with the ids of `DRAFTED`, most frequent first."""
    file = folder / "drafted.txt"
    file.write_text("\n".join(map(str, reversed(DRAFTED))))
    return file


def trained(kind: str) -> dict[str, Any]:
    """Return the settings for `our_model`."""
    return {"drafter": kind, "drafter_layers": None, **SETTINGS[kind]}


def gradients_of_stage(
    ours: Any,
    model: Any,
    head: Head,
    batch: dict[str, Any],
    packed: PackedSeqParams | None,
    own_S: Tensor | None = None,
    progress: float = HALFWAY,
) -> dict[str, Tensor]:
    """Return a drafter's gradients in a model of `train` with a stock model's weights, under the stock model's names.

    Args:
        head: the attached drafter.
        own_S: positions of this context-parallel rank; None for all.
        progress: fraction of the run that is over.
    """
    weights, settings, own = dict(model.named_parameters()), head.settings, f"{head.module}."
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(weights[name.replace("mtp.", own)])
    loss, group = depth_loss(settings), parallel_state.get_context_parallel_group()
    weights_D, share = depth_weights(settings, STEPS, 1.0, loss), base_share(settings, progress)
    objective = one_head(weights_D, group, loss, linear_main=True, trains_trunk=False, base_share=share)
    document_BS = None if packed is None else _documents(packed, batch["tokens"])
    shifted = {**batch, "loss_mask": batch["loss_mask"].float()}
    own_S = torch.arange(batch["tokens"].size(1)) if own_S is None else own_S
    depths = depth_batch(shifted, STEPS, document_BS).at(own_S)
    here = {name: batch[name][:, own_S] for name in ("tokens", "position_ids", "labels")}
    named: dict[str, Any] = {"output_processor": objective, "output_processor_context": [depths]}
    mask = batch["attention_mask"]
    made = ours(here["tokens"], here["position_ids"], mask, labels=here["labels"], packed_seq_params=packed, **named)
    (made.heads[0].loss / depths.whole_tokens[0]).backward()
    found = {name.replace("mtp.", own): each.grad for name, each in ours.named_parameters()}
    return {name: head.weight * grad for name, grad in found.items() if grad is not None and name.startswith(own)}


def batch_of(form: str) -> tuple[dict[str, Any], Any]:
    batch = make_batch(STEPS)
    return (batch, None) if form == "rows" else packed_batch(batch)


def given(batch: dict[str, Any]) -> tuple[Any, ...]:
    return batch["tokens"], batch["labels"], batch["loss_mask"]


def beside_policy(trunk: str, form: str, attaching: Callable[[Any], Any]) -> tuple[Any, dict[str, Tensor], list[str]]:
    """Return a stock model with heads, what it learned in one step, and which policy tensors differ from a model
    without.
    """
    (batch, packed), layers = batch_of(form), {} if trunk == "hybrid" else LAYERS
    plain, model = stock(trunk, **layers), stock(trunk, **layers)
    attached = attaching(model)
    for each in (plain, model):
        draw(each)
    destroy_moe_metrics_tracker()
    expected = learned(plain, batch, packed, None)
    destroy_moe_metrics_tracker()
    found = learned(model, batch, packed, lambda: attached.loss(*given(batch)).loss)
    return model, found, [name for name, value in expected.items() if not torch.equal(found[name], value)]
