"""Draft heads on a model of Megatron's own class, by three hooks on its forward; the class stays, and its methods.

before the forward      keep the call, and hide the heads: while it lasts, the model looks as if it had none, so that
                        Megatron's own MTP does not run, and its loss is not added
after the decoder       keep the attention inputs of the trunk's layers
after the forward       show the heads again

`../attach.py` adds a loss to a loop's own forward; `trained_stage.py` gives a run its objective. Whoever has a model
asks `attached_of(model)` for its heads.

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
    """What drafts from the trunk's output: MTP layers or a drafter.

    Attributes:
        depths: D.
        drafter: settings of a drafter; None of MTP layers.
    """

    depths: int
    drafter: "HeadSpec | None"

    @property
    def is_apart(self) -> bool:
        """Return whether the drafts train nothing of the trunk, including its embedding and output layer."""

    def drafts(self, trunk: TrunkOutput, batch: DepthBatch) -> tuple[list[Tensor], Tensor | None]:
        """Inputs of the output head, one a depth, and the logits of their confidence, if there is one."""

    def head_of(self, head: Head) -> Head:
        """The output head that drafts, from the trunk's."""

    def begin_head(self, head: Head) -> None:
        """Make new rows of the output head that drafts, from the trunk's, where it has rows of its own."""


class Attachment:
    """The draft heads of a pipeline stage, and what is asked of its model for them.

    Args:
        model: Megatron's, with the modules of its heads.
        heads: those that this stage holds.
        draft_vocabulary: this rank's drafted rows of the output head; None where all tokens are drafted.
        true_vocab_size: tokens; None if every row of the output head is one.
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
        """Put the hooks on the model."""
        self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.model.decoder.register_forward_hook(self._keep, with_kwargs=True)
        self.model.register_forward_hook(self._end, always_call=True)

    @property
    def depths(self) -> int:
        """D, of the first head."""
        return self.heads[0].depths

    @property
    def drafter(self) -> "HeadSpec | None":
        """The settings of the first head, if that is a drafter."""
        return self.heads[0].drafter if self.heads else None

    @property
    def head_owner(self) -> Any:
        """The module whose weight is the head's; a framework may put another output layer on the model."""
        return self.model.embedding.word_embeddings if self._head_is_embedding else self.model.output_layer

    def head(self, gathers: bool | None = None, *, detached: bool = False) -> Head:
        """The output head, as a loss needs it.

        Args:
            gathers: whether `project` gathers the slices of the vocabulary; None for the model's own choice.
            detached: whether the head is not trained.
        """
        owner = self.head_owner
        if self.config.mtp_num_layers and not is_detached(self.config):
            # With fused gradient accumulation the head returns a dummy gradient, which DDP would drop together with
            # that of the MTP layers' loss; with this mark the dummy is zero, and is added.
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
        """Output of a head.

        Args:
            hidden_SBH: the trunk's.
            batch: this rank's part.
            packed: of a row of several documents.
            length: positions of the whole sequences.
            is_apart: whether it passes no gradient to the trunk's states, embedding and output head.
        """
        position_ids_BS = to_device(batch.positions_S, hidden_SBH.device).expand_as(batch.labels_BS)
        turned = length if packed is None else packed.max_seqlen_q
        angles = self.rotary_angles(turned, packed_seq=packed is not None)[0] if self.turns_heads else None
        attention = AttentionInputs(rotary_pos_emb=angles, packed_seq_params=packed)
        return self.drafted_from(self.trunk_output(hidden_SBH, position_ids_BS, attention, is_apart), head, batch)

    def rows_of(self, head: DraftHead) -> DraftVocabulary | None:
        """This rank's rows of the output head that a head drafts with; None for all."""
        return self.draft_vocabulary

    def drafted_from(self, trunk: TrunkOutput, head: DraftHead, batch: DepthBatch) -> Drafted:
        """What a head drafts from the trunk's output."""
        return self.drafted_by(head, batch, *head.drafts(trunk, batch), is_apart=trunk.is_apart)

    def drafted_by(
        self, head: DraftHead, batch: DepthBatch, *made: Any, gathers: bool | None = None, is_apart: bool = False
    ) -> Drafted:
        """Output of a head, from what its `drafts` made; `is_apart` if no head may train the output head."""
        output = replace(self.head(gathers, detached=is_apart or head.is_apart), draft_vocabulary=self.rows_of(head))
        return Drafted(made[0], head.head_of(output), batch, made[1])

    def trunk_output(
        self, hidden_SBH: Tensor, position_ids_BS: Tensor, attention: AttentionInputs, is_apart: bool = False
    ) -> TrunkOutput:
        """What the heads read of a forward pass."""
        return TrunkOutput(hidden_SBH, position_ids_BS, self.embedding, attention, self._angles, is_apart=is_apart)

    @property
    def embedding(self) -> Any:
        """The trunk's, or this stage's copy of it."""
        return self.model.embedding

    def _angles(self, length: int, **others: Any) -> Tensor:
        return self.rotary_angles(length, **others)[0]

    @property
    def turns_heads(self) -> bool:
        """Return whether attention is given rotary angles; latent attention makes its own."""
        return self.model.position_embedding_type in ("rope", "yarn") and not self.config.multi_latent_attention

    def rotary_angles(self, length: int, **others: Any) -> tuple[Tensor, float]:
        """Angles [length, 1, 1, C] of the first positions, and YaRN's factor of their cosines and sines, else 1.

        Args:
            length: number of positions.
            others: further arguments of Megatron's module.
        """
        made = self.model.rotary_pos_emb(length, **others)
        return made if isinstance(made, tuple) else (made, 1.0)

    # --- the hooks ---------------------------------------------------------------------------------------------------

    def _begin(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Before the forward: keep its arguments, and hide the heads, except from Megatron's inference engine."""
        self._show()  # where KeyboardInterrupt ended the last forward: torch calls `_end` after an Exception alone
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
        """Mark the weights that Megatron's first forward would mark if it saw heads and output layer."""
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import (  # not there in 0.16
            FineGrainedActivationOffloadingInterface,
        )

        for parameter in self.model.parameters():
            FineGrainedActivationOffloadingInterface.mark_not_offload(parameter)

    def _hidden(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of the model while its forward runs."""
        config, weight = copy.copy(self.config), self.model.shared_embedding_or_output_weight()
        config.mtp_num_layers = None
        return {"config": config, "mtp_process": False, "shared_embedding_or_output_weight": lambda: weight}

    def _keep(self, _: Any, __: tuple[Any, ...], named: dict[str, Any], hidden_SBH: Any) -> Tensor | None:
        """After the decoder: keep its attention inputs."""
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
        """What the model goes on with in the place of the decoder's output; None for that."""

    def _end(self, _: Any, __: Any, output: Any) -> Any:
        """After the forward, also where it has failed: show the heads again."""
        call = self._show()
        return None if call is None or output is None else self._ended(call, output)

    def _show(self) -> dict[str, Any] | None:
        """Show the heads again if they are hidden; returns the arguments of the forward that hid them."""
        for name, before in self._shown.items():
            if before is None:
                del self.model.__dict__[name]
            else:
                self.model.__dict__[name] = before
        call, self._call, self._shown = self._call, None, {}
        return call

    def _ended(self, call: Mapping[str, Any], output: Any) -> Any:
        """What the forward returns in the place of its output; None for that."""


def attached_of(model: Any) -> Attachment:
    """The draft heads of a model of this package, or of one to which they are attached; the model is not wrapped."""
    found: Attachment = model.mtp_attached
    return found
