"""Attaches MTP layers and drafters to a model built by Megatron or a framework on top of it; its class stays the same.

    attached = attach(model, depths=2)                  on every rank, before the model is wrapped for data parallelism
    logits = model(tokens, positions, mask)             the loop's own forward; bit-identical to one without the layers
    loss = policy_loss(logits) + 0.1 * attached.loss(tokens, None, loss_mask).loss

    attach(model, depths=2, weight=0.1)                 add the same loss in every forward, with no other change

    attach(model, settings=MTPConfig(drafter="eagle3"))     a drafter, whose loss does not train the trunk

    attach(model, heads=[                               several heads, each with its own settings and weight
        Head(depths=1),
        Head(MTPConfig(drafter="eagle3", drafter_layers=(2, 12, 21))),
        Head(MTPConfig(drafter="dspark", drafter_steps=8), weight=0.5),
    ])

Uses the hooks of model/attachment.py: during a forward pass, the model looks as if it had no MTP layers.

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
from megatron_mtp.losses.stage_loss import (
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
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import is_head

__all__ = ["Attached", "Head", "attach"]

TOKENS, LABELS = "tokens", "labels"
"""What the loss mask of a forward without labels refers to."""


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
    """Attach draft heads to Megatron's `GPTModel` or `HybridModel`, or train the MTP layers that it already has.

    Call it on every rank, after the weights are loaded and before the model is wrapped for data parallelism and the
    optimizer is built. If the model has Megatron's MTP block, its modules and their names stay. Otherwise a new block
    of Megatron's class is initialized at `model.mtp` on the last stage. A drafter is added at `model.drafter_NAME`; it
    reads hidden states of the trunk, and its loss trains only the drafter. A checkpoint that lacks the new heads still
    loads strictly, and leaves them unchanged.

    Args:
        model: this rank's model, or its chunks.
        depths: number D of new MTP layers; None to train the model's own, or to attach only a drafter.
        settings: training settings, as in `Head`. If they name a `drafter`, it is attached too, with the default loss
            of its kind; it is attached alone if the model has no MTP layers and `depths` is None. `depths` and
            `settings` are a short form of `heads`.
        heads: one or more heads with different names; at most one of them is MTP layers.
        weight: weight of the loss, which is then added in every forward pass with gradients. It uses the labels of the
            forward, or the next tokens if there are no labels (or they are `input_ids` itself), and the forward's loss
            mask. In a loop without Megatron's schedules, call `MTPLossAutoScaler.set_loss_scale` with the factor of the
            trunk's loss, before the loop or after each forward. None if the loop calls `Attached.loss`.
        block: layer pattern of one MTP layer in a hybrid, such as `*-`. 'own' copies the pattern of the trunk's last
            layer; in a hybrid, of its last layer that mixes positions and all layers after it.
        mask_at: what the loss mask of a forward without labels refers to. 'tokens', as in Megatron-Core since 0.19:
            position i is 1 if `input_ids[i]` counts. 'labels': if `input_ids[i + 1]` counts. With labels, the mask
            always refers to them.
        true_vocab_size: number of tokens, if the output layer has padding rows; these then have no probability in the
            losses, and an exported drafter does not have them. None if every row is a token.
        placeholders: token ids that stand for images or audio, in addition to ids below 0. The trunk embeds the image
            or audio; heads do not train on positions whose input or target is a placeholder.

    Raises:
        ValueError: MTP layers cannot be attached to the model, it already has different ones, or a setting does not
            apply to them.
    """
    chunks: list[Any] = [unwrap_model(one) for one in (model if isinstance(model, list) else [model])]
    if strange := [type(one).__name__ for one in chunks if not isinstance(one, LanguageModule)]:
        raise ValueError(
            f"the model is a {strange[0]}, and MTP layers are attached to a GPTModel or HybridModel of Megatron's; "
            "give that, such as the language_model of a multimodal model."
        )
    adopts = bool(chunks[0].config.mtp_num_layers)
    if heads and (depths is not None or settings is not None):
        raise ValueError("heads were given with `depths=` or `settings=`, which are short for them; give only heads.")
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
        from megatron_mtp.model.stock_mtp import add_block

        assert mtp.depths is not None
        for chunk in chunks:
            add_block(chunk, mtp.depths, block)
    if drafters:
        for chunk in chunks:
            add_drafters(chunk, drafters, drafted)
            if mtp is None and not adopts and chunk.pg_collection.pp.size() > 1:
                share_embedding(chunk, next(iter(drafters.values())).drafts)
    if chunks[0].config.num_moe_experts is not None:
        from megatron_mtp.megatron.patches.table import install_for_experts  # dense models need no patch

        install_for_experts()
    if last.post_process:
        fill_absent(last, [*drafters, *([] if adopts or mtp is None else [MTP])])
    return Attached(last, heads, weight, mask_at, true_vocab_size, drafted, chunks, placeholders)


@dataclass(frozen=True)
class _Forward:
    """Values of a forward pass that the loss of the heads needs.

    Attributes:
        states_SBH: the decoder's output.
        read: states after the layers that drafters read, by layer number.
        tokens_BS, position_ids_BS: this rank's part of the input; None if the forward had none.
        attention: attention inputs of the trunk's layers.
        records: whether gradients were enabled.
        backward: autograd's task that ran the forward, during recomputation; otherwise `NO_BACKWARD`.
    """

    states_SBH: Tensor
    read: Mapping[int, Tensor]
    tokens_BS: Tensor | None
    position_ids_BS: Any
    attention: AttentionInputs
    records: bool
    backward: int


class Attached(Attachment):
    """Draft heads attached to a model, for a training loop.

    Args:
        model: the last chunk on the last stage; any chunk on other stages, which have no heads to train.
        heads: their settings, in the order of the losses.
        drafted: draft vocabulary [N] of heads, ascending, by module name; a head without an entry drafts all tokens.
        chunks: all chunks of this rank.
        placeholders: see `attach`.

    Attributes:
        given: settings of the heads.
        progress: fraction of the run that is over, `step / steps`, set by the loop before its forward passes. Domino
            weights the two parts of its loss by it.
        last: detached loss that `weight=` added to the last forward with gradients; None before the first.
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
        made = [_stock_head(model, head) if head.module == MTP else getattr(model, head.module) for head in here]
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
        """Set the draft vocabulary of a head; a drafter also gets its rows of the output layer."""
        tp, device = self.pg_collection.tp, self.head_owner.weight.device
        rows = DraftVocabulary(tokens_N.to(device), self.model.vocab_size // tp.size(), tp.size(), tp.rank())
        setattr(self.model, f"{module}_vocabulary", rows)  # registered as a submodule so that it moves with the model
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
        """Compute the loss of the heads for the microbatch whose forward pass has just run, on the last stage.

        Forward passes without a graph, such as a reference policy's, may run in between: with gradients enabled, the
        loss belongs to the last forward with a graph, or with gradients enabled if no states have a graph. Under
        `torch.no_grad` it belongs to the last forward.

        Args:
            tokens_BS, labels_BS, loss_mask_BS, normalizer: as in `mtp_loss` of losses/mtp_loss.py: whole sequences,
                even under context parallelism; the mask refers to labels. Packed parameters come from the forward.
            document_BS: document number of each position, for rows with several documents that are not packed: tokens,
                labels and mask are not shifted across document ends. Attention is the same as in the forward.

        Raises:
            ValueError: no forward has run since the last call, or only forwards of other tokens; the forward ran
                without gradients although the loss would train the trunk; the stage has no MTP layers; shapes differ;
                the output layer computes more than its weight; FSDP has sharded it or an MTP layer separately; or the
                layers are frozen and the loss would train the trunk through them.
        """
        if not self.heads:
            raise ValueError("this pipeline stage has no MTP layers; call Attached.loss on the last stage.")
        forward = self._taken(tokens_BS)
        packed = forward.attention.packed_seq_params
        return self._loss_of(forward, Batch(tokens_BS, labels_BS, loss_mask_BS, document_BS, packed, normalizer))

    def parameter_groups(self, **of_heads: Any) -> list[dict[str, Any]]:
        """Return parameter groups for a torch optimizer: the policy's parameters, and each head's on this rank.

            groups = attached.parameter_groups(lr=1e-4, clip_grad={"policy": 1.0, "eagle3": 0.5})
            optimizer = torch.optim.AdamW(groups, lr=1e-6)
            for group in optimizer.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], group.get("clip_grad", math.inf))

        A group's `name` is the head's, or 'policy'. For Megatron's optimizer, use `get_mtp_optimizer`.

        Args:
            of_heads: keys of the groups, such as `lr`: one value for all heads, or values by group name.

        Raises:
            ValueError: a given name is not the name of a group.
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
        """Return the forward that the loss is for. Each forward gives its loss once."""
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
        """Refuse tokens of a different forward with the same shape, if several have run."""
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
        """Return the tokens with placeholders replaced by -1."""
        return tokens_BS.masked_fill(torch.isin(tokens_BS, self._placeholders.to(tokens_BS.device)), -1)

    def _check_gathered(self) -> None:
        """Refuse modules that FSDP gathers only in their own forward, which does not run here."""
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
        """Compute the output of a head with the attention inputs of the forward."""
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
        """Store the forward for its loss, or add the loss to its states."""
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
            self._newest = None  # the loss is computed here
            apply: Callable[..., Tensor] = RidingLoss.apply  # torch annotates it since 2.15
            return apply(hidden_SBH, self._riding(forward, call, self.weight))
        self._newest, self._forwards = forward, self._forwards + 1
        has_graph = self._recorded is not None and self._recorded.states_SBH.requires_grad
        if hidden_SBH.requires_grad or (forward.records and not has_graph):  # a frozen trunk records no graph
            self._recorded = forward
        return None

    def _riding(self, forward: _Forward, call: Mapping[str, Any], weight: float) -> Tensor:
        """Compute the weighted loss of the running forward.

        Megatron's schedule scales it like the trunk's loss: divides it by the number of microbatches or, for a
        per-token loss, divides all sums by the tokens of the global batch. DDP then takes the mean, or the sum, over
        context-parallel ranks.
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
        """Gather whole sequences from the parts on context-parallel ranks."""
        group = self.pg_collection.cp
        if group.size() == 1:
            return part_BS
        parts = [torch.empty_like(part_BS) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part_BS.contiguous(), group=group)
        joined_BS = torch.cat(parts, dim=1)
        order_RS = positions_of_group(group, joined_BS.size(1), packed)
        return joined_BS[:, to_device(order_RS.flatten().argsort(), joined_BS.device)]


def _stock_head(model: Any, head: Head) -> DraftHead:
    from megatron_mtp.model.stock_mtp import StockHead

    return StockHead(model, head.settings.mtp_unroll)


def _check(chunk: Any, heads: Sequence[Head], weight: float | None, block: str, adopts: bool) -> None:
    """Refuse arguments that do not fit the model, and models whose forward pass the hooks cannot see."""
    if isinstance(getattr(chunk, "mtp_attached", None), Attached):
        raise ValueError("MTP layers are attached to this model already; use what attach returned.")
    arguments = [*refusals(heads), *refused_arguments(chunk, heads, weight, block, adopts)]
    for is_so, sentence in (*arguments, *refused_models(chunk, adopts)):
        if is_so:
            raise ValueError(sentence)
