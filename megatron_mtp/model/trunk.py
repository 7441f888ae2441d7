"""A trunk of Megatron's with draft heads on its last pipeline stage; the trunk is a GPT here, a hybrid in hybrid.py.

The trunk is one of Megatron's model classes, built without Megatron's own MTP. The stage that holds the heads gets them
and the shared embedding. Given an `Objective`, the last stage returns what the objective makes of the states of trunk
and heads; without one it is the plain model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch, to_device
from megatron_mtp.model.frozen import answer_with_zeros, freeze_trunk, trunk_modules
from megatron_mtp.model.head import (
    Drafted,
    DraftVocabulary,
    Head,
    StageOutput,
    attach_embedding,
    head_of,
    head_owner,
    mask_padding_,
    tokens_of_slice,
)
from megatron_mtp.model.heads import DraftHeads, HeadPlan, Made
from megatron_mtp.model.mtp import AttentionInputs, MultiTokenPredictionBlock, TrunkOutput
from megatron_mtp.model.stages import ReadStates, TrunkSchedulePlan, apart, as_one
from megatron_mtp.patches.saving import ABSENT

if TYPE_CHECKING:
    from megatron_mtp.model.drafter import Drafter


Objective = Callable[[StageOutput], Any]
"""Called by the last stage with the hidden states; its result is the model's output."""


class MTPTrunk(LanguageModule):
    """The draft heads' part of a pipeline stage, whatever Megatron class the trunk is; to be put before that class.

    Args:
        heads: those of the model, which one stage holds.
        train_only_mtp: whether the trunk stays as it is loaded.
        draft_vocabulary: the tokens that the heads draft, [N], ascending; None for all.
        absent_draft_vocabulary: whether the checkpoint that is about to be loaded lacks them.
        true_vocab_size: tokens; None if every row of the output head is one.
        trunk_arguments: of Megatron's class.
    """

    def __init__(
        self,
        *,
        heads: Sequence[HeadPlan] = (),
        train_only_mtp: bool = False,
        draft_vocabulary: Tensor | None = None,
        absent_draft_vocabulary: bool = False,
        true_vocab_size: int | None = None,
        **trunk_arguments: Any,
    ) -> None:
        self.true_vocab_size = true_vocab_size
        self._trunk_is_built, self._trunk_is_frozen = False, train_only_mtp
        self._stage_input: Tensor | None = None
        super().__init__(**trunk_arguments)
        self._trunk_is_built = True
        self._heads = DraftHeads(heads, absent_draft_vocabulary)
        self.mtp_process = bool(heads) and mtp_on_this_rank(
            layout=self.config.pipeline_model_parallel_layout,
            mtp_num_layers=self.config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=self.vp_stage,
        )
        if self.mtp_process:
            attach_embedding(self)
            self._heads.build(self, draft_vocabulary)
        if self.pre_process or self.post_process or self.mtp_process:
            self.setup_embeddings_and_output_layer()
        self.draft_vocabulary = None
        if draft_vocabulary is not None and self.post_process:
            ranks = self.pg_collection.tp.size()
            slice_size = self.vocab_size // ranks
            self.draft_vocabulary = DraftVocabulary(draft_vocabulary, slice_size, ranks, self.pg_collection.tp.rank())
        self._read = ReadStates(self, self._heads.reads)
        if train_only_mtp:
            freeze_trunk(self)

    @property
    def heads(self) -> list[MultiTokenPredictionBlock]:
        """The draft heads that this stage holds."""
        return self._heads.blocks

    @property
    def drafter(self) -> "Drafter | None":
        """The settings of the first head, if that is a drafter."""
        return self.heads[0].drafter if self.heads else None

    def train(self, mode: bool = True) -> "MTPTrunk":
        """A frozen trunk stays in evaluation: no dropout, no statistics of routers."""
        super().train(mode)
        if self._trunk_is_frozen:
            for module in trunk_modules(self):
                module.eval()
        return self

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Megatron's; a frozen trunk records no gradients of what it takes from the stage before."""
        is_after_mtp = self.post_process and not self.mtp_process
        if self._trunk_is_frozen and not is_after_mtp:
            given = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
            self._stage_input, input_tensor = given, None if given is None else given.detach()
        super().set_input_tensor(self._read.received(input_tensor))

    def setup_embeddings_and_output_layer(self) -> None:
        """Megatron's, which copies the embedding between stages: only once the MTP stage has its own.

        With gradient accumulation fusion the output layer returns a dummy gradient. DDP would drop it together with the
        gradient of the depths' loss; with `zero_out_wgrad` the dummy is zero and DDP adds the sum.
        """
        if not self._trunk_is_built:
            return
        super().setup_embeddings_and_output_layer()
        if self.post_process and self.config.mtp_num_layers and not self.config.mtp_detach_heads:
            head_owner(self).weight.zero_out_wgrad = True

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> Any:
        """Megatron's, after `mtp_init` has made the layers that the checkpoint lacks."""
        filled, new_heads = self._heads.filled(state_dict, self.state_dict)
        self._heads.all_loaded()
        loaded = super().load_state_dict(filled, strict=strict, **kwargs)
        for block in new_heads:
            block.begin_head(self.head())
        return loaded

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Megatron's; what is absent from the checkpoint that is about to be loaded has a key that says so."""
        entries = super().sharded_state_dict(prefix, *args, **kwargs)
        absent = tuple(prefix + name for name in self._heads.lacking())
        for name, entry in entries.items():
            if absent and name.startswith(absent):
                entry.key = ABSENT + entry.key
        return entries

    def _postprocess(
        self,
        hidden_states: Tensor,
        *,
        output_processor: Objective | None = None,
        output_processor_context: Sequence[DepthBatch] | None = None,
        **trunk_outputs: Any,
    ) -> Any:
        """Called after the decoder, with everything that the trunk's forward knows."""
        if InferenceMode.is_active():  # Megatron's engine takes the last logits, and drafts after it has verified
            return super()._postprocess(hidden_states, **trunk_outputs)
        if self._stage_input is not None:
            hidden_states = answer_with_zeros(hidden_states, self._stage_input)
        batches, gathers = output_processor_context, trunk_outputs["runtime_gather_output"]
        made: list[Made] = []
        if self.heads and batches is not None:
            attention = AttentionInputs(**{name: trunk_outputs[name] for name in AttentionInputs.__annotations__})
            made = self._heads.drafts(self._output(hidden_states, trunk_outputs["position_ids"], attention), batches)
            if self._stage_input is not None:
                for states, _ in made:
                    states[0] = answer_with_zeros(states[0], self._stage_input)
        if not self.post_process:
            return self._read.sent(as_one(hidden_states, [state for states, _ in made for state in states]))
        drafted = list[Drafted]()
        if self._heads.plans and not self.heads and batches is not None:
            hidden_states, states = apart(hidden_states, self.config.mtp_num_layers)
            drafted = [Drafted(states, self.head(gathers, self.config.mtp_detach_heads), batches[0])]
        head = self.head(gathers)
        if output_processor is not None:
            if made and batches is not None:
                drafted = self._heads.outputs(made, batches, lambda detached: self.head(gathers, detached))
            return output_processor(StageOutput(hidden_states, head, drafted, batches))
        logits_SBV = head.project(hidden_states)
        if trunk_outputs["labels"] is None:
            return logits_SBV.transpose(0, 1).contiguous()
        return head.cross_entropy(trunk_outputs["labels"], logits_SBV)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Megatron's, of labels [B, S] and logits [S, B, V / TP]; rows that pad the vocabulary have no probability.

        The logits are overwritten.
        """
        tokens = tokens_of_slice(self.true_vocab_size, logits.size(-1), self.pg_collection.tp.rank())
        return super().compute_language_model_loss(labels, mask_padding_(logits, tokens))

    @property
    def depths(self) -> int:
        """D, of the stage that has them."""
        return self.heads[0].depths

    def drafted(
        self, hidden_SBH: Tensor, batch: DepthBatch, packed: PackedSeqParams | None, length: int, is_apart: bool
    ) -> Drafted:
        """Output of the first head, for `loss_of_stage` in losses/mtp_loss.py, which says what it gives."""
        turned = length if packed is None else packed.max_seqlen_q
        angles = self.rotary_angles(turned, packed_seq=packed is not None)[0] if self.turns_heads else None
        attention = AttentionInputs(rotary_pos_emb=angles, packed_seq_params=packed)
        position_ids_BS = to_device(batch.positions_S, hidden_SBH.device).expand_as(batch.labels_BS)
        trunk, block = self._output(hidden_SBH, position_ids_BS, attention), self.heads[0]
        before, self.config.mtp_detach_heads = self.config.mtp_detach_heads, is_apart
        try:
            states, confidence_DSB = block.drafts(trunk, batch)
            head = block.head_of(self.head(detached=block.is_apart))
        finally:
            self.config.mtp_detach_heads = before
        return Drafted(states, head, batch, confidence_DSB)

    def _output(self, hidden_SBH: Tensor, position_ids_BS: Tensor, attention: AttentionInputs) -> TrunkOutput:
        """What the heads read of a forward pass."""
        read_SBX = self._read.taken() if self._read.after else None
        return TrunkOutput(hidden_SBH, position_ids_BS, self.embedding, attention, self._angles, read_SBX)

    def _angles(self, length: int, **others: Any) -> Tensor:
        return self.rotary_angles(length, **others)[0]

    @property
    def turns_heads(self) -> bool:
        """Return whether attention is given rotary angles; latent attention makes its own."""
        return self.position_embedding_type in ("rope", "yarn") and not self.config.multi_latent_attention

    def rotary_angles(self, length: int, **others: Any) -> tuple[Tensor, float]:
        """Angles [length, 1, 1, C] of the first positions, and YaRN's factor of their cosines and sines, else 1.

        Args:
            length: number of positions.
            others: further arguments of Megatron's module.
        """
        made = self.rotary_pos_emb(length, **others)
        return made if isinstance(made, tuple) else (made, 1.0)

    def head(self, runtime_gather_output: bool | None = None, detached: bool = False) -> Head:
        """The output head, as a loss needs it; detached, it is not trained."""
        owner = head_owner(self)
        return head_of(self, owner, runtime_gather_output, detached, self.draft_vocabulary, self.true_vocab_size)


class MTPGPTModel(MTPTrunk, GPTModel):
    """Megatron's GPT, whose forward calls `_postprocess` after the decoder."""

    def build_schedule_plan(self, *inputs: Any, **named: Any) -> "TrunkSchedulePlan":
        """The plan of a forward with these arguments, for `--overlap-moe-expert-parallel-comm`."""
        return TrunkSchedulePlan(self, *inputs, **named)
