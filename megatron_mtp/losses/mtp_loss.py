"""MTP loss for custom training loops: fine-tuning, and RL trainers whose policy has MTP layers.

    logits_BSV, hidden_SBH = model(tokens_BS, position_ids_BS, mask, output_processor=logits_and_states)
    loss = policy_loss(logits_BSV, ...) + 0.1 * mtp_loss(hidden_SBH.detach(), model, tokens_BS, None, mask_BS).loss

The first line is the loop's own forward pass, under any parallel layout and in Megatron's schedules. Without a policy
loss, `trunk_states` does the forward pass. For rows with several packed documents, pass `packed_seq_params` to both
calls, or `document_BS`: trunk and MTP layers then attend within documents, and a row computes the same as its documents
one by one.

Letters in names: S sequence, B batch, H hidden, D depths, V this rank's slice of the vocabulary.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.data.batch import NO_DOCUMENT, to_device
from megatron_mtp.losses.stage_loss import Batch, MTPLoss, loss_of_stage, own_positions
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.stage_output import StageOutput
from megatron_mtp.spec.config import MTPConfig


def logits_and_states(stage: StageOutput) -> tuple[Tensor, Tensor]:
    """Return logits [B, S, V] and the states [S, B, H] for `mtp_loss`.

    Pass this as `output_processor` to a model's forward.

    The logits are bit by bit those of a forward without labels. Stages before the last one return what they always do.
    """
    return stage.head.project(stage.hidden_SBH).transpose(0, 1).contiguous(), stage.hidden_SBH


def trunk_states(model: torch.nn.Module, tokens_BS: Tensor, document_BS: Tensor | None = None) -> Tensor:
    """Compute the trunk's hidden states after its final norm, [S, B, H], with gradients.

    Args:
        model: model with one pipeline stage; wrapped or not.
        tokens_BS: whole sequences; a context-parallel rank computes its part of them.
        document_BS: as in `mtp_loss`.

    Raises:
        ValueError: sequence parallelism is used with several rows of documents, or the model has several pipeline
            stages.
    """
    trunk = unwrap_model(model)
    if not (trunk.pre_process and trunk.post_process):
        raise ValueError(
            "trunk_states runs a whole model, and this is one of several pipeline stages; call the model in Megatron's "
            "schedule, with output_processor=logits_and_states."
        )
    packed = None if document_BS is None else packed_rows(document_BS, trunk.config.sequence_parallel)
    joined_BS = tokens_BS if packed is None else tokens_BS.reshape(1, -1)
    positions_S = to_device(own_positions(trunk.pg_collection.cp, joined_BS.size(1), packed), tokens_BS.device)
    states: Tensor = model(
        joined_BS[:, positions_S],
        positions_S.expand(len(joined_BS), -1),
        None,  # no mask means causal attention
        packed_seq_params=packed,
        output_processor=lambda stage: stage.hidden_SBH,  # no batch is passed, so the MTP layers do not run
    )
    return states if packed is None else states.view(len(tokens_BS), -1, states.size(-1)).transpose(0, 1)


def mtp_loss(
    hidden_SBH: Tensor,
    model: torch.nn.Module,
    tokens_BS: Tensor,
    labels_BS: Tensor | None,
    loss_mask_BS: Tensor,
    settings: MTPConfig | None = None,
    document_BS: Tensor | None = None,
    *,
    packed_seq_params: PackedSeqParams | None = None,
    normalizer: Tensor | float | None = None,
) -> MTPLoss:
    """Compute the loss of the model's MTP layers from the trunk's hidden states.

    Args:
        hidden_SBH: this rank's output of `logits_and_states` or `trunk_states`. If detached, the MTP loss does not
            reach the trunk, including its embedding and output layer; `mtp_train_only` in the settings does the same.
            The trunk's gradients are then bit-identical to those of a step without this call.
        model: the last pipeline stage, wrapped or not.
        tokens_BS: input tokens of the trunk, whole sequences even under context parallelism. Targets that depend on a
            token below 0, such as an image placeholder, are not learned.
        labels_BS: t_{i+1} at position i, as for the trunk. A label below 0, such as -100, is masked. Labels of the MTP
            layers are shifted here. None for the next tokens of `tokens_BS`.
        loss_mask_BS: 1 where the label counts, for example in the response to a prompt.
        settings: loss, temperature and weights of the MTP layers; cross-entropy by default. The soft labels of kd and
            tv come from the trunk, without gradient. The draft vocabulary is always the model's.
        document_BS: document number of each position, for rows with several documents; -1 on padding.
        packed_seq_params: the argument of the model's forward, with one row; an alternative to `document_BS`.
        normalizer: divisor of each depth's sum, so that microbatches and ranks add up: the tokens of a global batch, or
            a tensor that broadcasts to [B, S], such as each sequence's length times the number of sequences. None for
            each depth's number of unmasked tokens in this call.

    Raises:
        ValueError: the stage has no MTP layers, shapes differ, a label on the CPU is a padding row of the vocabulary,
            there is no such loss, the settings ask for hidden-state mixing, or sequence parallelism is used with
            several rows of documents.
    """
    trunk = unwrap_model(model)
    settings = settings or MTPConfig()
    _check_stage(trunk, settings)
    document_BS = None if packed_seq_params is not None else document_BS
    batch = Batch(tokens_BS, labels_BS, loss_mask_BS, document_BS, packed_seq_params, normalizer)
    if document_BS is not None:
        batch = _joined(batch, trunk.config.sequence_parallel)
        hidden_SBH = hidden_SBH.transpose(0, 1).reshape(1, -1, hidden_SBH.size(-1)).transpose(0, 1)
    stage = attached_of(trunk)
    return loss_of_stage(stage, stage.heads[0], hidden_SBH, batch, settings)


def _check_stage(trunk: Any, settings: MTPConfig) -> None:
    if not trunk.config.mtp_num_layers:
        raise ValueError("the model has no MTP layers; attach some with megatron-mtp convert attach-mtp.")
    if not (trunk.mtp_process and trunk.post_process):
        raise ValueError(
            "this pipeline stage does not have both the MTP layers and the output layer; call mtp_loss on the last "
            "stage, and build the model without a separate stage for the MTP layers."
        )
    if settings.mtp_hidden_state_mixing:
        raise ValueError(
            "mtp_hidden_state_mixing is set, which draws by the number of the step, and mtp_loss does not know it; "
            "leave it out, or attach the layers."
        )


# --- documents ------------------------------------------------------------------------------------------------------


def _joined(batch: Batch, cuts_rows: bool) -> Batch:
    """Join all rows into one packed row."""
    assert batch.document_BS is not None
    packed, normalizer = packed_rows(batch.document_BS, cuts_rows), batch.normalizer
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.expand_as(batch.tokens_BS).reshape(1, -1)
    rows = batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, _apart(batch.document_BS)
    tokens, labels, mask, documents = (None if each is None else each.reshape(1, -1) for each in rows)
    assert tokens is not None
    assert mask is not None
    return Batch(tokens, labels, mask, documents, packed, normalizer)


def packed_rows(document_BS: Tensor, cuts_rows: bool) -> PackedSeqParams:
    """Return Megatron's `packed_seq_params` for the documents, with all rows joined.

    `cuts_rows` is sequence parallelism.
    """
    if cuts_rows and len(document_BS) > 1:
        raise ValueError(
            f"document_BS has {len(document_BS)} rows, which sequence parallelism cuts; join them to one row."
        )
    changes_BS = document_BS.diff(dim=1, prepend=document_BS[:, :1] - 1) != 0  # every row starts a document
    starts = changes_BS.flatten().nonzero()[:, 0]
    offsets = pad(starts, (0, 1), value=document_BS.numel()).to(torch.int32)
    longest = int(offsets.diff().max())
    return PackedSeqParams("thd", offsets, offsets, None, None, longest, longest, total_tokens=document_BS.numel())


def _apart(document_BS: Tensor) -> Tensor:
    """Return document numbers that also differ between rows."""
    first_B1 = (document_BS.max() + 1) * torch.arange(len(document_BS), device=document_BS.device).unsqueeze(1)
    return torch.where(document_BS == NO_DOCUMENT, document_BS, document_BS + first_B1)
