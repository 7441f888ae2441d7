"""MTP layers and drafters on a model that Megatron, or a framework on top of it, has built; its class stays.

    attached = attach(model, depths=2)                  on every rank, before the model is wrapped for data parallelism
    logits = model(tokens, positions, mask)             the loop's own forward, bit by bit as without the layers
    loss = policy_loss(logits) + 0.1 * attached.loss(tokens, None, loss_mask).loss

    attach(model, depths=2, weight=0.1)                 the same loss in every forward, without another line

    attach(model, settings=MTPConfig(drafter="eagle3"))     a drafter, whose loss trains nothing of the model

    attach(model, heads=[                               several heads, each with its own settings and weight
        Head(depths=1),
        Head(MTPConfig(drafter="eagle3", drafter_layers=(2, 12, 21))),
        Head(MTPConfig(drafter="dspark", drafter_steps=8), weight=0.5),
    ])

The hooks are those of model/attachment.py: while a forward runs, the model looks as if it had no MTP layers.

Letters in names: D depths, S sequence, B batch, H hidden, R context-parallel ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, override

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_mtp.data.batch import DepthBatch, to_device
from megatron_mtp.losses.mtp_loss import (
    HALFWAY,
    Batch,
    MTPLoss,
    RidingLoss,
    loss_of_stage,
    own_positions,
    positions_of_group,
)
from megatron_mtp.losses.table import check_loss
from megatron_mtp.model.attachment import Attachment, DraftHead
from megatron_mtp.model.draft_vocabulary import DraftVocabulary, tokens_of_file
from megatron_mtp.model.stage_output import Drafted
from megatron_mtp.model.stages import ReadStates
from megatron_mtp.model.stock import (
    FROZEN,
    OWN,
    StockHead,
    add_block,
    fill_absent,
    is_frozen,
    refused_arguments,
    refused_heads,
    refused_models,
    share_embedding,
    tied_embedding,
)
from megatron_mtp.model.trunk_output import AttentionInputs, is_detached
from megatron_mtp.spec.attached import MTP, POLICY, Head, heads_of_settings, mtp_among, refusals
from megatron_mtp.spec.config import MTPConfig, is_head

TOKENS, LABELS = "tokens", "labels"
"""Where the loss mask of a forward without labels stands."""


def attach(
    model: nn.Module | list[nn.Module],
    depths: int | None = None,
    settings: MTPConfig | None = None,
    weight: float | None = None,
    block: str = OWN,
    mask_at: str = TOKENS,
    true_vocab_size: int | None = None,
    heads: Sequence[Head] = (),
    placeholders: Sequence[int] = (),
) -> "Attached":
    """Attach draft heads to a `GPTModel` or `HybridModel` of Megatron's, or train the MTP layers that it has.

    All ranks call it: after weights are loaded, before the model is wrapped for data parallelism and before the
    optimizer is made. A model with Megatron's MTP block keeps its modules and their names. Else a block of Megatron's
    class is drawn and put at `model.mtp`, on the last stage. A drafter is put at `model.drafter_NAME`; it reads states
    of the trunk's layers, and its loss trains nothing but itself. A checkpoint of the model without new heads still
    loads strictly, and leaves them as they are.

    Args:
        model: this rank's model, or its chunks.
        depths: D, of a new block; None for the model's own, or for a drafter alone.
        settings: what the layers learn, as in `Head`. With `drafter` a drafter of this kind is attached too, or alone
            where the model has no MTP layers and `depths` is None; beside MTP layers it learns what its kind learns by
            default. `depths` and `settings` are short for `heads`.
        heads: one or more, each by another name, with at most one of MTP layers.
        weight: of the loss, which then rides along in every forward with gradients, and is trained with what the
            forward gives: its labels, or the next tokens where it has none (or where they are its very `input_ids`),
            and its loss mask. In a loop without Megatron's schedules, set `MTPLossAutoScaler.set_loss_scale` to what
            multiplies the trunk's loss, before the loop or after each forward. None where the loop asks for
            `Attached.loss`.
        block: of a hybrid, the pattern of a depth, such as `*-`. 'own' for the trunk's last layer, or for a hybrid's
            last layer that mixes positions with those after it.
        mask_at: where the loss mask of a forward without labels stands. 'tokens', as in Megatron-Core since 0.19: it
            is 1 at position i where `input_ids[i]` counts. 'labels': where `input_ids[i + 1]` does. With labels it
            stands at them.
        true_vocab_size: tokens, where further rows of the output layer only pad it; they then have no probability in
            the losses, and an exported drafter has no row for them. None if every row is a token.
        placeholders: ids of tokens that stand for images or audio, beside those below 0. The trunk embeds what they
            stand for; the heads learn nothing where an input or a target is one of them.

    Raises:
        ValueError: the model cannot have MTP layers attached, or has others than these, or a setting is not for them.
    """
    chunks: list[Any] = [unwrap_model(one) for one in (model if isinstance(model, list) else [model])]
    if strange := [type(one).__name__ for one in chunks if not isinstance(one, LanguageModule)]:
        raise ValueError(
            f"the model is a {strange[0]}, and MTP layers are attached to a GPTModel or HybridModel of Megatron's; "
            "give that, such as the language_model of a multimodal model."
        )
    adopts = bool(chunks[0].config.mtp_num_layers)
    if heads and (depths is not None or settings is not None):
        raise ValueError("heads were given with what is short for them; give the heads alone.")
    heads = [each.with_usual_loss() for each in heads or heads_of_settings(settings or MTPConfig(), depths, adopts)]
    if mask_at not in (TOKENS, LABELS):
        raise ValueError(f"mask_at is '{mask_at}'; give '{TOKENS}' or '{LABELS}'.")
    if true_vocab_size is not None and not 1 <= true_vocab_size <= chunks[0].vocab_size:
        raise ValueError(
            f"true_vocab_size is {true_vocab_size}, and the output layer has {chunks[0].vocab_size} rows; give at most "
            "those."
        )
    for chunk in chunks:
        _check(chunk, heads, weight, block, adopts)
    for head in heads:
        check_loss(head.settings)
    mtp, drafters, last = mtp_among(heads), {}, next((one for one in chunks if one.post_process), chunks[-1])
    if any(head.settings.drafter is not None for head in heads):
        from megatron_mtp.model.stock_drafter import add_drafters, described

        drafters = {
            head.module: described(chunks[-1], head.settings, true_vocab_size) for head in heads if head is not mtp
        }
    size = true_vocab_size or last.vocab_size
    drafted = {
        head.module: torch.tensor(tokens_of_file(Path(file), size, "mtp_draft_vocab_file"))
        for head in heads
        if (file := head.settings.mtp_draft_vocab_file) is not None
    }
    if mtp is not None and not adopts:
        assert mtp.depths is not None
        for chunk in chunks:
            add_block(chunk, mtp.depths, block)
    if drafters:
        for chunk in chunks:
            add_drafters(chunk, drafters, drafted)
            if mtp is None and not adopts and chunk.pg_collection.pp.size() > 1:
                share_embedding(chunk, next(iter(drafters.values())).drafts)
    if chunks[0].config.num_moe_experts is not None:
        from megatron_mtp.megatron.patches.table import install_for_experts  # dense models need no patch of Megatron

        install_for_experts()
    if last.post_process:
        fill_absent(last, [*drafters, *([] if adopts or mtp is None else [MTP])])
    return Attached(last, heads, weight, mask_at, true_vocab_size, drafted, chunks, placeholders)


@dataclass(frozen=True)
class _Forward:
    """A forward of the model, as the loss of its heads needs it.

    Attributes:
        states_SBH: the decoder's output.
        read: states after the layers that drafters read, by the numbers of the layers.
        tokens_BS, position_ids_BS: this rank's part of its input; None where it had none.
        attention: inputs of the trunk's layers.
        records: whether gradients were on.
        backward: autograd's task in which it ran, as recomputation does; else `NO_BACKWARD`.
    """

    states_SBH: Tensor
    read: Mapping[int, Tensor]
    tokens_BS: Tensor | None
    position_ids_BS: Any
    attention: AttentionInputs
    records: bool
    backward: int


class Attached(Attachment):
    """The draft heads of a model, as a training loop needs them.

    Args:
        model: the chunk on the last stage, or any on another stage, which has no heads to train.
        heads: what they are and learn, in the order of the losses.
        drafted: the tokens [N] that a head drafts, ascending, by the name of its module; all tokens without an entry.
        chunks: all of this rank.
        placeholders: see `attach`.

    Attributes:
        given: what the heads are and learn.
        progress: the share of the run that is over, which the loop sets before its forwards, as `step / steps`. Domino
            weighs the two parts of its loss by it.
        last: what `weight=` added to the last forward with gradients, without a graph; None before.
    """

    def __init__(
        self,
        model: Any,
        heads: Sequence[Head],
        weight: float | None,
        mask_at: str = TOKENS,
        true_vocab_size: int | None = None,
        drafted: Mapping[str, Tensor] = MappingProxyType({}),
        chunks: Sequence[Any] = (),
        placeholders: Sequence[int] = (),
    ) -> None:
        here = heads if model.post_process else ()
        made = [
            StockHead(model, head.settings.mtp_unroll) if head.module == MTP else getattr(model, head.module)
            for head in here
        ]
        super().__init__(model, made, true_vocab_size=true_vocab_size)
        self.given, self.weight, self.mask_at, self._chunks = list(heads), weight, mask_at, chunks
        self.progress = HALFWAY
        self._placeholders = torch.tensor([*placeholders], dtype=torch.long)
        layers = {number for head in self.heads if head.drafter is not None for number in head.drafter.layers}
        self._read = ReadStates(model, tuple(sorted(layers)))
        self._states: Mapping[int, Tensor] = {}
        self._losses = 0
        self.last: MTPLoss | None = None
        self._newest: _Forward | None = None
        self._recorded: _Forward | None = None
        self._forwards = 0  # since the last loss
        self._position_ids_BS: Any = None
        self._rows: dict[DraftHead, DraftVocabulary] = {}
        for head, given in zip(self.heads, here, strict=True):
            if given.module in drafted:
                self._draft_only(drafted[given.module], head, given.module)
        if model.post_process:
            self._tied = None if hasattr(model, "embedding") else tied_embedding(model)
            self.hook()

    def _draft_only(self, tokens_N: Tensor, head: DraftHead, module: str) -> None:
        """Give a head its draft vocabulary, and a drafter the output layer's rows of it."""
        tp, device = self.pg_collection.tp, self.head_owner.weight.device
        rows = DraftVocabulary(tokens_N.to(device), self.model.vocab_size // tp.size(), tp.size(), tp.rank())
        setattr(self.model, f"{module}_vocabulary", rows)  # so that it moves with the model
        self._rows[head] = rows
        head.begin_head(replace(self.head(), draft_vocabulary=rows))

    @override
    def rows_of(self, head: DraftHead) -> DraftVocabulary | None:
        return self._rows.get(head)

    def loss(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None,
        loss_mask_BS: Tensor,
        normalizer: Tensor | float | None = None,
        document_BS: Tensor | None = None,
    ) -> MTPLoss:
        """The loss of the heads in the microbatch whose forward has just run, on the last stage.

        Forwards without a graph, such as that of a reference policy, may run in between: under gradients the loss is
        that of the last forward with a graph, or with gradients on where no states have a graph. Under `torch.no_grad`
        it is that of the last forward.

        Args:
            tokens_BS, labels_BS, loss_mask_BS, normalizer: as in `mtp_loss` of losses/mtp_loss.py: whole sequences,
                under context parallelism too; the mask stands at labels. Packed parameters are those of the forward.
            document_BS: where tokens, labels and mask are not shifted across the ends of documents that rows have
                without packed parameters; attention is that of the forward.

        Raises:
            ValueError: no forward has run since the last call, or others than that of these tokens; the forward ran
                without gradients, and the loss would train the trunk; the stage has no MTP layers, shapes differ, the
                output layer is not read as it computes, FSDP has sharded it or an MTP layer by itself, or the layers
                are frozen and the loss would train the trunk through them.
        """
        if not self.heads:
            raise ValueError("this pipeline stage has no MTP layers; call Attached.loss on the last stage.")
        forward = self._taken(tokens_BS)
        packed = forward.attention.packed_seq_params
        return self._loss_of(forward, Batch(tokens_BS, labels_BS, loss_mask_BS, document_BS, packed, normalizer))

    def parameter_groups(self, **of_heads: Any) -> list[dict[str, Any]]:
        """Groups for an optimizer of torch: the policy's parameters, and those of each head on this rank.

            groups = attached.parameter_groups(lr=1e-4, clip_grad={"policy": 1.0, "eagle3": 0.5})
            optimizer = torch.optim.AdamW(groups, lr=1e-6)
            for group in optimizer.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], group.get("clip_grad", math.inf))

        A group's `name` is that of the head, or 'policy'. Megatron's optimizer has its own groups: `get_mtp_optimizer`.

        Args:
            of_heads: keys of the groups, such as `lr`: a value for the heads, or values by the names of groups.

        Raises:
            ValueError: no group has a name that was given.
        """
        heads = {head.module: head.called for head in self.given}
        groups: dict[str, dict[str, Any]] = {name: {"name": name, "params": []} for name in (POLICY, *heads.values())}
        for chunk in self._chunks:
            for name, parameter in chunk.named_parameters():
                groups[heads.get(name.partition(".")[0], POLICY)]["params"].append(parameter)
        for key, given in of_heads.items():
            values = given if isinstance(given, Mapping) else dict.fromkeys(heads.values(), given)
            if strange := values.keys() - groups.keys():
                raise ValueError(f"{key} is given for {', '.join(sorted(strange))}; give it for {', '.join(groups)}.")
            for name, value in values.items():
                groups[name][key] = value
        return [group for group in groups.values() if group["params"]]

    def _taken(self, tokens_BS: Tensor) -> _Forward:
        """The forward whose loss is asked for; its loss is taken once."""
        records, task = torch.is_grad_enabled(), torch._C._current_graph_task_id()
        kept = self._recorded if records else None, self._newest
        forward = next((each for each in kept if each is not None and each.backward == task), None)
        if forward is None:
            raise ValueError(
                "no forward of the model has run since the last loss of its MTP layers; call the model first"
                + (", or attach without weight, which takes the loss already." if self.weight is not None else ".")
            )
        if records and not forward.records and self._trains_trunk():
            raise ValueError(
                "the model's forward ran without gradients, as under torch.no_grad or in a reentrant checkpoint "
                "around the model, so the MTP layers' loss would not train the trunk; run the forward with gradients "
                "(use_reentrant=False), or set mtp_train_only in the settings."
            )
        if self._forwards > 1:
            self._check_tokens(forward, tokens_BS)
        if records or forward is self._recorded:
            self._recorded = None
        self._newest, self._forwards = None, int(self._recorded is not None)
        return forward

    def _trains_trunk(self) -> bool:
        """Return whether the loss trains more than the MTP layers."""
        mtp = mtp_among(self.given)
        if mtp is None or mtp.settings.mtp_train_only or is_detached(self.config):
            return False
        return any(
            each.requires_grad for name, each in self.model.named_parameters() if not is_head(name.partition(".")[0])
        )

    def _check_tokens(self, forward: _Forward, tokens_BS: Tensor) -> None:
        """Refuse tokens of another forward of the same shape, where several have run."""
        if forward.tokens_BS is None:
            return
        own_S = own_positions(self.pg_collection.cp, tokens_BS.size(1), forward.attention.packed_seq_params)
        own_BS = tokens_BS[:, to_device(own_S, tokens_BS.device)]
        if own_BS.shape == forward.tokens_BS.shape and not torch.equal(own_BS, forward.tokens_BS):
            raise ValueError(
                f"{self._forwards} forwards of the model have run since the last loss of its MTP layers, and these "
                "tokens are not those of the one that the loss is of; ask for the loss after each forward."
            )

    def _loss_of(self, forward: _Forward, batch: Batch) -> MTPLoss:
        self._check_gathered()
        if len(self._placeholders):
            labels_BS = None if batch.labels_BS is None else self._text(batch.labels_BS)
            batch = replace(batch, tokens_BS=self._text(batch.tokens_BS), labels_BS=labels_BS)
        for is_so, sentence in refused_heads(self.model, self.head_owner):
            if is_so:
                raise ValueError(sentence)
        self._attention, self._position_ids_BS = forward.attention, forward.position_ids_BS
        self._states, self._losses = forward.read, self._losses + torch.is_grad_enabled()
        step = self._losses if torch.is_grad_enabled() else 0
        made = {
            given.called: loss_of_stage(self, head, forward.states_SBH, batch, given.settings, step, self.progress)
            for given, head in zip(self.given, self.heads, strict=True)
        }
        mtp = mtp_among(self.given)
        if mtp is not None and made[mtp.called].loss.requires_grad and is_frozen(self.model.mtp):
            raise ValueError(FROZEN)
        total = torch.stack([given.weight * made[given.called].loss for given in self.given]).sum()
        return MTPLoss(total, made[self.given[0].called].depth_means, made)

    def _text(self, tokens_BS: Tensor) -> Tensor:
        """The tokens with -1 in the place of placeholders."""
        return tokens_BS.masked_fill(torch.isin(tokens_BS, self._placeholders.to(tokens_BS.device)), -1)

    def _check_gathered(self) -> None:
        """Refuse modules that FSDP gathers in their own forward alone, which does not run here."""
        layers = self.model.mtp.layers if mtp_among(self.given) is not None else ()
        drafters = [getattr(self.model, each.module) for each in self.given if each.settings.drafter is not None]
        read = [getattr(self.head_owner, "weight", None), *(layer.enorm.weight for layer in layers)]
        read += [weight for block in drafters for weight in block.parameters()]
        if any(hasattr(weight, "_megatron_fsdp_model") for weight in read):
            raise ValueError(
                "Megatron-FSDP has wrapped the model, and gathers the output layer and the heads in their own forward "
                "alone; wrap it in DistributedDataParallel, with the distributed optimizer, or in fully_shard."
            )
        if any(isinstance(weight, DTensor) for weight in read):
            raise ValueError(
                "FSDP has sharded the output layer, the tied embedding, an MTP layer or a drafter by itself, and "
                "gathers it in that module's forward alone; leave these to the FSDP of the whole model."
            )

    @property
    @override
    def embedding(self) -> Any:
        if self._tied is None:
            return self.model.embedding
        self._tied.word_embeddings.weight = self.model.output_layer.weight
        return self._tied.train(self.model.training)

    @override
    def drafted(
        self, head: DraftHead, hidden_SBH: Tensor, batch: DepthBatch, packed: Any, length: int, is_apart: bool
    ) -> Drafted:
        """Output of a head, with the attention inputs of the forward."""
        trunk = self.trunk_output(hidden_SBH, self._position_ids_BS, self._attention, is_apart)
        if head.drafter is not None:
            positions_BS = to_device(batch.positions_S, hidden_SBH.device).expand_as(batch.labels_BS)
            trunk = replace(trunk, read=self._states, position_ids_BS=positions_BS)
        return self.drafted_from(trunk, head, batch)

    # --- the hooks ---------------------------------------------------------------------------------------------------

    @override
    def _begin(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._read.begin(model)
        return super()._begin(model, given, named)

    @override
    def _decoded(self, call: Mapping[str, Any], hidden_SBH: Tensor) -> Tensor | None:
        """Keep the forward for its loss, or add the loss to its states."""
        forward = _Forward(
            hidden_SBH,
            self._read.taken(),
            call.get("input_ids"),
            call.get("position_ids"),
            self._attention,
            torch.is_grad_enabled(),
            torch._C._current_graph_task_id(),
        )
        if self.weight is not None and forward.records:
            self._newest = None  # its loss is taken here
            apply: Callable[..., Tensor] = RidingLoss.apply  # torch types it from 2.15 on
            return apply(hidden_SBH, self._riding(forward, call, self.weight))
        self._newest, self._forwards = forward, self._forwards + 1
        has_graph = self._recorded is not None and self._recorded.states_SBH.requires_grad
        if hidden_SBH.requires_grad or (forward.records and not has_graph):  # a frozen trunk's states have no graph
            self._recorded = forward
        return None

    def _riding(self, forward: _Forward, call: Mapping[str, Any], weight: float) -> Tensor:
        """The weighted loss of the forward that is running.

        Megatron's schedule scales it as the trunk's loss: divided by microbatches, or all sums by the tokens of the
        global batch where the loss is per token. DDP then has the mean over context-parallel ranks, or the sum.
        """
        tokens_BS, labels_BS, mask_BS = (call.get(name) for name in ("input_ids", "labels", "loss_mask"))
        if tokens_BS is None:
            raise ValueError(
                "the forward of the last pipeline stage has no input_ids, which its MTP layers read; give it the "
                "tokens too."
            )
        mask_BS = torch.ones_like(tokens_BS) if mask_BS is None else mask_BS
        per_token, packed = self.config.calculate_per_token_loss, forward.attention.packed_seq_params
        labels_BS = None if labels_BS is None or labels_BS is tokens_BS else self._whole(labels_BS, packed)
        tokens_BS, mask_BS = self._whole(tokens_BS, packed), self._whole(mask_BS, packed)
        normalizer, at_tokens = 1.0 if per_token else None, self.mask_at == TOKENS
        made = self._loss_of(forward, Batch(tokens_BS, labels_BS, mask_BS, None, packed, normalizer, at_tokens))
        self.last = made.without_graph()
        return weight * (1 if per_token else self.pg_collection.cp.size()) * made.loss

    def _whole(self, part_BS: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Whole sequences, of the parts that context-parallel ranks have."""
        group = self.pg_collection.cp
        if group.size() == 1:
            return part_BS
        parts = [torch.empty_like(part_BS) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part_BS.contiguous(), group=group)
        joined_BS = torch.cat(parts, dim=1)
        order_RS = positions_of_group(group, joined_BS.size(1), packed)
        return joined_BS[:, to_device(order_RS.flatten().argsort(), joined_BS.device)]


def _check(chunk: Any, heads: Sequence[Head], weight: float | None, block: str, adopts: bool) -> None:
    """Refuse arguments that do not fit the model, and models whose forward the hooks would not see."""
    if isinstance(getattr(chunk, "mtp_attached", None), Attached):
        raise ValueError("MTP layers are attached to this model already; use what attach returned.")
    arguments = [*refusals(heads), *refused_arguments(chunk, heads, weight, block, adopts)]
    for is_so, sentence in (*arguments, *refused_models(chunk, adopts)):
        if is_so:
            raise ValueError(sentence)
