"""MTP layers on a model that Megatron, or a framework on top of it, has built; its class stays.

    attached = attach(model, depths=2)                  on every rank, before the model is wrapped for data parallelism
    logits = model(tokens, positions, mask)             the loop's own forward, bit by bit as without the layers
    loss = policy_loss(logits) + 0.1 * attached.loss(tokens, None, loss_mask).loss

    attach(model, depths=2, weight=0.1)                 the same loss in every forward, without another line

Three hooks see a forward: one before it keeps the call, one after the decoder keeps the states, and one after it undoes
what the first has hidden: while the forward runs, the model looks as if it had no depths. So Megatron's own block does
not run, and its loss is not added.

Letters in names: D depths, S sequence, B batch, H hidden, R context-parallel ranks.
"""

import copy
import inspect
from dataclasses import fields, replace
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_mtp.config import MTPConfig
from megatron_mtp.data.batch import DepthBatch, to_device
from megatron_mtp.losses.mtp_loss import Batch, MTPLoss, loss_of_stage, positions_of_group
from megatron_mtp.model.head import Drafted, Head, head_of, head_owner
from megatron_mtp.model.mtp import AttentionInputs, chain, own_masks
from megatron_mtp.model.stock import OWN, Refused, add_block, refused_models, runner, tied_embedding

READ = {
    *("mtp_loss", "mtp_loss_mix", "mtp_temperature", "mtp_lk_eta", "mtp_label_smoothing", "mtp_z_loss"),
    *("mtp_loss_weights", "mtp_train_only"),
}
"""Settings that attached depths read: loss, temperature, weights, and whether the loss trains the depths alone."""


def attach(
    model: nn.Module | list[nn.Module],
    depths: int | None = None,
    settings: MTPConfig | None = None,
    weight: float | None = None,
    block: str = OWN,
) -> "Attached":
    """Attach MTP layers to a `GPTModel` or `HybridModel` of Megatron's, or train those that it has.

    All ranks call it: after weights are loaded, before the model is wrapped for data parallelism and before the
    optimizer is made. A model with Megatron's MTP block keeps its modules and their names. Else a block of Megatron's
    class is drawn and put at `model.mtp`, on the last stage.

    Args:
        model: this rank's model, or its chunks.
        depths: D, of a new block; None for the model's own.
        settings: what the depths learn; with `mtp_train_only` their loss trains nothing else. Cross-entropy by default.
        weight: of the loss, which then rides along in every forward with gradients, and is trained with what the
            forward gives: its labels, or the next tokens where it has none, and its loss mask. In a loop without
            Megatron's schedules, set `MTPLossAutoScaler.set_loss_scale` to what multiplies the trunk's loss. None
            where the loop asks for `Attached.loss`.
        block: of a hybrid, the pattern of a depth, such as `*-`. 'own' for the trunk's last layer, or for a hybrid's
            last layer that mixes positions with those after it.

    Raises:
        ValueError: the model cannot have depths attached, or has others than these, or a setting is not for them.
    """
    chunks: list[Any] = [unwrap_model(one) for one in (model if isinstance(model, list) else [model])]
    settings = settings or MTPConfig()
    adopts = bool(chunks[0].config.mtp_num_layers)
    for chunk in chunks:
        _check(chunk, depths, settings, block, adopts)
        if not adopts:
            assert depths is not None
            add_block(chunk, depths, block)
        chunk.mtp_is_attached = True
    if chunks[0].config.num_moe_experts is not None:
        from megatron_mtp.patches.table import install_for_experts  # dense models need no patch of Megatron

        install_for_experts()
    return Attached(next((one for one in chunks if one.post_process), None), settings, weight)


class Attached:
    """The depths of a model, as a training loop needs them.

    Attributes:
        last: what `weight=` added to the last forward, without a graph; None before.
    """

    def __init__(self, model: Any, settings: MTPConfig, weight: float | None) -> None:
        self.model, self.settings, self.weight = model, settings, weight
        self.last: MTPLoss | None = None
        self._call: dict[str, Any] | None = None
        self._states_SBH: Tensor | None = None
        self._attention = AttentionInputs()
        self._position_ids_BS: Any = None
        self._shown: dict[str, Any] = {}
        if model is None:
            return
        self.config, self.pg_collection, self.depths = model.config, model.pg_collection, model.config.mtp_num_layers
        self._layers = [runner(layer) for layer in model.mtp.layers]
        self._owner = head_owner(model)
        self._embedding = model.embedding if hasattr(model, "embedding") else tied_embedding(model)
        self._signature = inspect.signature(model.forward)
        # With fused gradient accumulation the head returns a dummy gradient, which DDP would drop together with that of
        # the depths' loss; with this mark the dummy is zero, and is added.
        self._owner.weight.zero_out_wgrad = True
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.decoder.register_forward_hook(self._keep, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def loss(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None,
        loss_mask_BS: Tensor,
        normalizer: Tensor | float | None = None,
        document_BS: Tensor | None = None,
    ) -> MTPLoss:
        """The loss of the depths in the microbatch whose forward has just run, on the last stage.

        Args:
            tokens_BS, labels_BS, loss_mask_BS, normalizer: as in `mtp_loss` of losses/mtp_loss.py: whole sequences,
                under context parallelism too. Packed parameters are those of the forward.
            document_BS: where tokens, labels and mask are not shifted across the ends of documents that rows have
                without packed parameters; attention is that of the forward.

        Raises:
            ValueError: no forward has run since the last call, the stage has no depths, or shapes differ.
        """
        if self.model is None:
            raise ValueError("this pipeline stage has no MTP layers; call Attached.loss on the last stage.")
        if self._states_SBH is None:
            raise ValueError(
                "no forward of the model has run since the last loss of its MTP layers; call the model first"
                + (", or attach without weight, which takes the loss already." if self.weight is not None else ".")
            )
        states_SBH, self._states_SBH = self._states_SBH, None
        packed = self._attention.packed_seq_params
        batch = Batch(tokens_BS, labels_BS, loss_mask_BS, document_BS, packed, normalizer)
        return loss_of_stage(self, states_SBH, batch, self.settings)

    def head(self, *, detached: bool) -> Head:
        """The output head; detached, it is not trained."""
        return head_of(self.model, self._owner, detached=detached)

    def drafted(self, hidden_SBH: Tensor, batch: DepthBatch, packed: Any, length: int, is_apart: bool) -> Drafted:
        """Output of the depths (`Stage` in losses/mtp_loss.py), with the attention inputs of the forward."""
        assert batch.tokens_DBS is not None
        shifted_in_DBS = ~batch.inside_DBS if self.config.num_moe_experts is not None else None
        masks = own_masks(shifted_in_DBS, self.depths, self.config, self.pg_collection.tp)
        self._embedding.train(self.model.training)
        tokens = batch.tokens_DBS, self._position_ids_BS, self._embedding
        states = chain(self._layers, hidden_SBH, *tokens, self._attention, masks, is_apart)
        return Drafted(states, self.head(detached=is_apart), batch)

    # --- the hooks ---------------------------------------------------------------------------------------------------

    def _begin(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before the forward: keep its arguments, and hide the depths, except from Megatron's inference engine."""
        call = {**self._signature.bind_partial(*given).arguments, **named}
        self._states_SBH = None
        if any(call.get(name) is not None for name in ("inference_context", "inference_params")):
            return
        config, weight = copy.copy(model.config), model.shared_embedding_or_output_weight()
        config.mtp_num_layers = None
        hidden = {"config": config, "mtp_process": False, "shared_embedding_or_output_weight": lambda: weight}
        self._shown = {name: model.__dict__[name] for name in hidden if name in model.__dict__}
        model.__dict__.update(hidden)
        self._call = call

    def _keep(self, _: Any, __: tuple[Any, ...], named: dict[str, Any], hidden_SBH: Any) -> Tensor | None:
        """After the decoder: keep its output, or add the loss to it."""
        if self._call is None:
            return None
        if not isinstance(hidden_SBH, Tensor):
            raise ValueError(
                f"the model's decoder returns a {type(hidden_SBH).__name__}, and MTP layers are attached to one that "
                "returns a tensor of hidden states; turn off what adds streams or outputs to it."
            )
        self._attention = AttentionInputs(**{name: named.get(name) for name in AttentionInputs.__annotations__})
        self._states_SBH, self._position_ids_BS = hidden_SBH, self._call.get("position_ids")
        if self.weight is None:
            return None
        if not torch.is_grad_enabled():
            self._states_SBH = None
            return None
        made: Tensor = MTPLossAutoScaler.apply(hidden_SBH, self._riding())
        return made

    def _end(self, model: Any, *_: Any) -> None:
        """After the forward, also where it has failed: show the depths again."""
        if self._call is not None:
            self._call = None
            del model.__dict__["shared_embedding_or_output_weight"]
            model.__dict__.update(self._shown)

    def _riding(self) -> Tensor:
        """The weighted loss of the forward that is running.

        Megatron's schedule scales it as the trunk's loss: divided by microbatches, or all sums by the tokens of the
        global batch where the loss is per token. DDP then has the mean over context-parallel ranks, or the sum.
        """
        assert self._call is not None
        assert self.weight is not None
        tokens_BS, labels_BS, mask_BS = (self._call.get(name) for name in ("input_ids", "labels", "loss_mask"))
        if tokens_BS is None:
            raise ValueError(
                "the forward of the last pipeline stage has no input_ids, which its MTP layers read; give it the "
                "tokens too."
            )
        mask_BS = torch.ones_like(tokens_BS) if mask_BS is None else mask_BS
        per_token = self.config.calculate_per_token_loss
        tokens_BS, mask_BS = self._whole(tokens_BS), self._whole(mask_BS)
        labels_BS = None if labels_BS is None else self._whole(labels_BS)
        made = self.loss(tokens_BS, labels_BS, mask_BS, 1.0 if per_token else None)
        self.last = replace(made, loss=made.loss.detach())
        return self.weight * (1 if per_token else self.pg_collection.cp.size()) * made.loss

    def _whole(self, part_BS: Tensor) -> Tensor:
        """Whole sequences, of the parts that context-parallel ranks have."""
        group, packed = self.pg_collection.cp, self._attention.packed_seq_params
        if group.size() == 1:
            return part_BS
        parts = [torch.empty_like(part_BS) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part_BS.contiguous(), group=group)
        joined_BS = torch.cat(parts, dim=1)
        order_RS = positions_of_group(group, joined_BS.size(1), packed)
        return joined_BS[:, to_device(order_RS.flatten().argsort(), joined_BS.device)]


def _check(chunk: Any, depths: int | None, settings: MTPConfig, block: str, adopts: bool) -> None:
    """Refuse arguments that do not fit the model, and models whose forward the hooks would not see."""
    for is_so, sentence in (*_arguments(chunk, depths, settings, block, adopts), *refused_models(chunk, adopts)):
        if is_so:
            raise ValueError(sentence)


def _arguments(chunk: Any, depths: int | None, settings: MTPConfig, block: str, adopts: bool) -> Refused:
    own = chunk.config.mtp_num_layers
    unread = [
        one.name for one in fields(MTPConfig) if one.name not in READ and getattr(settings, one.name) != one.default
    ]
    return [
        (unread, f"{', '.join(unread)} in the settings is not for attached MTP layers; megatron-mtp train has it."),
        (
            getattr(chunk, "mtp_is_attached", False),
            "MTP layers are attached to this model already; use what attach returned.",
        ),
        (
            depths is None and not adopts,
            "the model has no MTP layers, and depths is None; give the number of new ones.",
        ),
        (
            adopts and depths not in (None, own),
            f"the model has {own} MTP layers, and depths is {depths}; give None to train those.",
        ),
        (depths is not None and depths < 1, f"depths is {depths}; give 1 or more."),
        (
            block != OWN and (adopts or not hasattr(chunk, "hybrid_stack_spec")),
            f"block is '{block}', which is the pattern of a hybrid's new MTP layers; give 'own' to other models.",
        ),
    ]
