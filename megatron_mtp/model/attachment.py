"""Attaches draft heads to a model of Megatron's own class with three hooks on its forward; class and methods stay.

before the forward      store the call and hide the heads: during the forward the model looks as if it had none, so
                        that Megatron's own MTP does not run and does not add its loss
after the decoder       store the attention inputs of the trunk's layers
after the forward       show the heads again

`../attach.py` adds a loss to a loop's own forward; `trained_stage.py` gives a run its objective. `attached_of(model)`
returns the heads of a model.

Letters in names: D depths, S sequence, B batch, H hidden, C channels.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from megatron_mtp.data.batch import DepthBatch, to_device
from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.model.head import Head, head_of
from megatron_mtp.model.shared_embedding import is_embedding
from megatron_mtp.model.stage_output import Drafted
from megatron_mtp.model.trunk_output import AttentionInputs, TrunkOutput, is_detached

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_mtp.spec.head import HeadSpec

INFERENCE = ("inference_context", "inference_params")
"""Arguments of a forward for Megatron's inference engine, which calls the heads itself."""


class DraftHead(Protocol):
    """Interface of a draft head: MTP layers or a drafter that draft from the trunk's output.

    Attributes:
        depths: number D of draft tokens.
        drafter: settings of a drafter; None for MTP layers.
    """

    depths: int
    drafter: "HeadSpec | None"

    @property
    def is_apart(self) -> bool:
        """Return whether the loss of the drafts leaves the trunk alone, including its embedding and output layer."""

    def drafts(self, trunk: TrunkOutput, batch: DepthBatch) -> tuple[list[Tensor], Tensor | None]:
        """Compute the inputs of the output layer, one per depth, and confidence logits if the head has them."""

    def head_of(self, head: Head) -> Head:
        """Return the output layer for drafts, given the trunk's."""

    def begin_head(self, head: Head) -> None:
        """Initialize the output layer for drafts from the trunk's, if it has rows of its own."""


class Attachment:
    """Draft heads of a pipeline stage, with access to the parts of its model that they need.

    Args:
        model: Megatron's model, which holds the modules of the heads.
        heads: heads on this stage.
        draft_vocabulary: this rank's rows of the output layer in the draft vocabulary; None to draft all tokens.
        true_vocab_size: number of tokens; None if every row of the output layer is a token.
    """

    def __init__(
        self,
        model: Any,
        heads: Sequence[DraftHead] = (),
        draft_vocabulary: DraftVocabulary | None = None,
        true_vocab_size: int | None = None,
    ) -> None:
        self.model, self.config, self.pg_collection = model, model.config, model.pg_collection
        self.heads, self.draft_vocabulary, self.true_vocab_size = list(heads), draft_vocabulary, true_vocab_size
        self._head_is_embedding = model.post_process and is_embedding(model)
        self._names = [*inspect.signature(model.forward).parameters]
        self._call: dict[str, Any] | None = None
        self._shown: dict[str, Any] = {}
        self._attention = AttentionInputs()
        model.mtp_attached = self

    def hook(self) -> None:
        """Install the hooks on the model."""
        self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.model.decoder.register_forward_hook(self._keep, with_kwargs=True)
        self.model.register_forward_hook(self._end, always_call=True)

    @property
    def depths(self) -> int:
        """Number D of draft tokens of the first head."""
        return self.heads[0].depths

    @property
    def drafter(self) -> "HeadSpec | None":
        """Settings of the first head if it is a drafter, otherwise None."""
        return self.heads[0].drafter if self.heads else None

    @property
    def head_owner(self) -> Any:
        """Module that owns the output weight; a framework may have replaced the model's output layer."""
        return self.model.embedding.word_embeddings if self._head_is_embedding else self.model.output_layer

    def head(self, gathers: bool | None = None, *, detached: bool = False) -> Head:
        """Return the output layer for a loss.

        Args:
            gathers: whether `project` gathers the slices of the vocabulary; None to use the model's setting.
            detached: whether the output layer gets no gradient.
        """
        owner = self.head_owner
        if self.config.mtp_num_layers and not is_detached(self.config):
            # With fused gradient accumulation the output layer returns a dummy gradient. DDP would drop it, and with it
            # the gradient of the MTP loss. This attribute makes the dummy zero, and DDP adds it.
            owner.weight.zero_out_wgrad = True
        return head_of(self.model, owner, gathers, detached, self.draft_vocabulary, self.true_vocab_size)

    def drafted(
        self,
        head: DraftHead,
        hidden_SBH: Tensor,
        batch: DepthBatch,
        packed: "PackedSeqParams | None",
        length: int,
        is_apart: bool,
    ) -> Drafted:
        """Compute the output of a head.

        Args:
            hidden_SBH: the trunk's output.
            batch: this rank's part of the batch.
            packed: packed-sequence parameters of a row with several documents.
            length: number of positions in the whole sequences.
            is_apart: whether no gradient is passed to the trunk's states, embedding and output layer.
        """
        position_ids_BS = to_device(batch.positions_S, hidden_SBH.device).expand_as(batch.labels_BS)
        turned = length if packed is None else packed.max_seqlen_q
        angles = self.rotary_angles(turned, packed_seq=packed is not None)[0] if self.turns_heads else None
        attention = AttentionInputs(rotary_pos_emb=angles, packed_seq_params=packed)
        return self.drafted_from(self.trunk_output(hidden_SBH, position_ids_BS, attention, is_apart), head, batch)

    def rows_of(self, head: DraftHead) -> DraftVocabulary | None:
        """Return this rank's rows of the output layer in a head's draft vocabulary; None for all rows."""
        return self.draft_vocabulary

    def drafted_from(self, trunk: TrunkOutput, head: DraftHead, batch: DepthBatch) -> Drafted:
        """Run a head on the trunk's output."""
        return self.drafted_by(head, batch, *head.drafts(trunk, batch), is_apart=trunk.is_apart)

    def drafted_by(
        self, head: DraftHead, batch: DepthBatch, *made: Any, gathers: bool | None = None, is_apart: bool = False
    ) -> Drafted:
        """Build the output of a head from the result of its `drafts`; `is_apart`: no head trains the output layer."""
        output = replace(self.head(gathers, detached=is_apart or head.is_apart), draft_vocabulary=self.rows_of(head))
        return Drafted(made[0], head.head_of(output), batch, made[1])

    def trunk_output(
        self, hidden_SBH: Tensor, position_ids_BS: Tensor, attention: AttentionInputs, is_apart: bool = False
    ) -> TrunkOutput:
        """Collect what the heads read from a forward pass."""
        return TrunkOutput(hidden_SBH, position_ids_BS, self.embedding, attention, self._angles, is_apart=is_apart)

    @property
    def embedding(self) -> Any:
        """The trunk's embedding, or this stage's copy of it."""
        return self.model.embedding

    def _angles(self, length: int, **others: Any) -> Tensor:
        return self.rotary_angles(length, **others)[0]

    @property
    def turns_heads(self) -> bool:
        """Return whether attention takes rotary angles as input; latent attention computes its own."""
        return self.model.position_embedding_type in ("rope", "yarn") and not self.config.multi_latent_attention

    def rotary_angles(self, length: int, **others: Any) -> tuple[Tensor, float]:
        """Return angles [length, 1, 1, C] of the first positions, and YaRN's factor for cosines and sines, or 1.

        Args:
            length: number of positions.
            others: further arguments of Megatron's module.
        """
        made = self.model.rotary_pos_emb(length, **others)
        return made if isinstance(made, tuple) else (made, 1.0)

    # --- the hooks ---------------------------------------------------------------------------------------------------

    def _begin(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Before the forward: store its arguments and hide the heads, except from Megatron's inference engine."""
        self._show()  # KeyboardInterrupt may have ended the last forward: torch calls `_end` only after an Exception
        call = {**dict(zip(self._names, given, strict=False)), **named}
        if any(call.get(name) is not None for name in INFERENCE):
            return
        if getattr(self.config, "fine_grained_activation_offloading", False) and model.disable_param_offloading:
            self._keep_weights_on_device()
        hidden = self._hidden(call)
        self._shown = {name: model.__dict__.get(name) for name in hidden}
        model.__dict__.update(hidden)
        self._call = call

    def _keep_weights_on_device(self) -> None:
        """Mark the weights that Megatron's first forward would mark if it saw the heads and the output layer."""
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import (  # missing in 0.16
            FineGrainedActivationOffloadingInterface,
        )

        for parameter in self.model.parameters():
            FineGrainedActivationOffloadingInterface.mark_not_offload(parameter)

    def _hidden(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that attributes of the model have during its forward."""
        config, weight = copy.copy(self.config), self.model.shared_embedding_or_output_weight()
        config.mtp_num_layers = None
        return {"config": config, "mtp_process": False, "shared_embedding_or_output_weight": lambda: weight}

    def _keep(self, _: Any, __: tuple[Any, ...], named: dict[str, Any], hidden_SBH: Any) -> Tensor | None:
        """After the decoder: store its attention inputs."""
        if self._call is None:
            return None
        if not isinstance(hidden_SBH, Tensor):
            raise ValueError(
                f"the model's decoder returns a {type(hidden_SBH).__name__}, and MTP layers read a tensor of hidden "
                "states; turn off what adds streams or outputs to it."
            )
        self._attention = AttentionInputs(**{name: named.get(name) for name in AttentionInputs.__annotations__})
        return self._decoded(self._call, hidden_SBH)

    def _decoded(self, call: Mapping[str, Any], hidden_SBH: Tensor) -> Tensor | None:
        """Return a replacement for the decoder's output, or None to keep it."""

    def _end(self, _: Any, __: Any, output: Any) -> Any:
        """After the forward, even if it failed: show the heads again."""
        call = self._show()
        return None if call is None or output is None else self._ended(call, output)

    def _show(self) -> dict[str, Any] | None:
        """Show the heads again if they are hidden. Return the arguments of the forward that hid them."""
        for name, before in self._shown.items():
            if before is None:
                del self.model.__dict__[name]
            else:
                self.model.__dict__[name] = before
        call, self._call, self._shown = self._call, None, {}
        return call

    def _ended(self, call: Mapping[str, Any], output: Any) -> Any:
        """Return a replacement for the output of the forward, or None to keep it."""


def attached_of(model: Any) -> Attachment:
    """Return the draft heads of an unwrapped model: one built by this package, or one with attached heads."""
    found: Attachment = model.mtp_attached
    return found
