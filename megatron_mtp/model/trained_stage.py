"""A pipeline stage of a model in training with draft heads: Megatron's GPT or hybrid, as built by build.py.

    model(tokens, positions, mask, output_processor=objective, output_processor_context=batches)

The stage that holds the heads has them as submodules, together with the shared embedding. With an `Objective`, the
model's forward ends after the decoder, and the last stage returns the objective's result for the states of trunk and
heads; without one, the forward is that of the plain model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, override

from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.model.attachment import Attachment, DraftHead
from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.model.frozen import answer_with_zeros, freeze_trunk, trunk_modules
from megatron_mtp.model.heads import DraftHeads
from megatron_mtp.model.mtp_block import MultiTokenPredictionBlock
from megatron_mtp.model.passed_states import apart, as_one
from megatron_mtp.model.shared_embedding import attach_embedding
from megatron_mtp.model.stage_output import Drafted, StageOutput
from megatron_mtp.model.stages import ReadStates
from megatron_mtp.model.trunk_output import AttentionInputs, TrunkOutput

Objective = Callable[[StageOutput], Any]
"""Called by the last stage with the hidden states; its result is the model's output."""

HeadDrafts = tuple[DraftHead, DepthBatch, list[Tensor], Tensor | None]
"""A head, its batch, and its drafts: states and confidence logits."""

OBJECTIVE, BATCHES = "output_processor", "output_processor_context"
"""Arguments that are not passed on to Megatron's forward: the objective and the batch of every head."""


class TrainedStage(Attachment):
    """Draft heads of a stage; adds their modules and hooks to the model.

    Args:
        model: Megatron's model, built without MTP; it does not share its embedding with other stages yet.
        heads: draft heads of the model; one stage holds all of them.
        draft_vocabulary: token ids [N] that the heads draft, ascending; None for all tokens.
        true_vocab_size: number of tokens; None if every row of the output layer is a token.
        train_only_mtp: whether the trunk is frozen.
    """

    def __init__(
        self,
        model: Any,
        heads: DraftHeads,
        draft_vocabulary: Tensor | None = None,
        true_vocab_size: int | None = None,
        train_only_mtp: bool = False,
    ) -> None:
        model.mtp_process = bool(heads.plans) and mtp_on_this_rank(
            layout=model.config.pipeline_model_parallel_layout,
            mtp_num_layers=model.config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=model.vp_stage,
        )
        if model.mtp_process:
            attach_embedding(model)
            heads.build(model, draft_vocabulary)
        if model.pre_process or model.post_process or model.mtp_process:
            model.setup_embeddings_and_output_layer()
        drafted = None
        if draft_vocabulary is not None and model.post_process:
            tp = model.pg_collection.tp
            drafted = DraftVocabulary(draft_vocabulary, model.vocab_size // tp.size(), tp.size(), tp.rank())
            model.draft_vocabulary = drafted  # registered as a submodule so that it moves with the model
        super().__init__(model, heads.blocks, drafted, true_vocab_size)
        self._heads, self._read, self._is_frozen = heads, ReadStates(model, heads.reads), train_only_mtp
        self._stage_input: Tensor | None = None
        self._new_heads: list[MultiTokenPredictionBlock] = []
        if train_only_mtp:
            freeze_trunk(model)
        self.hook()
        model.register_load_state_dict_pre_hook(self._fill)
        model.register_load_state_dict_post_hook(self._begin_heads)

    def finish(
        self,
        hidden_SBH: Tensor,
        objective: Objective | None,
        batches: Sequence[DepthBatch] | None,
        position_ids_BS: Any,
        attention: AttentionInputs,
        gathers: bool | None = None,
    ) -> Any:
        """Compute the stage's output: input of the next stage or, on the last one, the result of the objective.

        Args:
            hidden_SBH: the decoder's output.
            batches: one batch per head; None if the heads do not run.
            attention: attention inputs of the trunk's layers.
            gathers: whether logits are gathered over tensor-parallel ranks; None to use the model's setting.
        """
        made = list[HeadDrafts]()
        if self.heads and batches is not None:
            trunk = self.trunk_output(hidden_SBH, position_ids_BS, attention)
            made = [(head, batch, *head.drafts(trunk, batch)) for head, batch in zip(self.heads, batches, strict=True)]
        if self._stage_input is not None:
            for _, _, states, _ in made:
                states[0] = answer_with_zeros(states[0], self._stage_input)
        if not self.model.post_process:
            return self._read.sent(as_one(hidden_SBH, [state_SBH for _, _, states, _ in made for state_SBH in states]))
        assert objective is not None
        drafted = [self.drafted_by(*drafts, gathers=gathers) for drafts in made]
        if self._comes_after_heads and batches is not None:
            hidden_SBH, states = apart(hidden_SBH, self.config.mtp_num_layers)
            drafted = [Drafted(states, self.head(gathers, detached=self.config.mtp_detach_heads), batches[0])]
        return objective(StageOutput(hidden_SBH, self.head(gathers), drafted, batches))

    @property
    def read(self) -> ReadStates:
        """Return the states of the trunk's layers that a drafter reads."""
        return self._read

    @property
    def _comes_after_heads(self) -> bool:
        """Return whether this is the last stage, and an earlier one holds the heads."""
        return bool(self.model.post_process and self._heads.plans and not self.heads)

    @override
    def trunk_output(
        self, hidden_SBH: Tensor, position_ids_BS: Tensor, attention: AttentionInputs, is_apart: bool = False
    ) -> TrunkOutput:
        made = super().trunk_output(hidden_SBH, position_ids_BS, attention, is_apart)
        return replace(made, read=self._read.taken())

    # --- the hooks ---------------------------------------------------------------------------------------------------

    @override
    def _begin(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._is_frozen and model.decoder.training:  # no dropout, no router statistics
            for module in trunk_modules(model):
                module.eval()
        self._receive()
        super()._begin(model, given, named)
        return given, {name: value for name, value in named.items() if name not in (OBJECTIVE, BATCHES)}

    def _receive(self) -> None:
        """Split what the previous stage sent; a frozen trunk computes no gradients for it."""
        decoder, is_recorded = self.model.decoder, self.model.pre_process or not self._is_frozen
        self._stage_input = None if is_recorded or self._comes_after_heads else decoder.input_tensor
        if self._stage_input is not None:
            decoder.input_tensor = self._stage_input.detach()
        self._read.begin(self.model)

    @override
    def _hidden(self, call: Mapping[str, Any]) -> dict[str, Any]:
        hidden = super()._hidden(call)
        if call.get(OBJECTIVE) is not None:
            return hidden | {"post_process": False}  # stop after the decoder
        if not self.model.post_process:
            return hidden
        return hidden | {"compute_language_model_loss": self.head().cross_entropy}

    @override
    def _decoded(self, call: Mapping[str, Any], hidden_SBH: Tensor) -> Tensor | None:
        return None if self._stage_input is None else answer_with_zeros(hidden_SBH, self._stage_input)

    @override
    def _ended(self, call: Mapping[str, Any], output: Any) -> Any:
        attention, self._attention = self._attention, AttentionInputs()
        objective = call.get(OBJECTIVE)
        if self.model.post_process and objective is None:
            return None
        gathers = call.get("runtime_gather_output")
        return self.finish(output, objective, call.get(BATCHES), call.get("position_ids"), attention, gathers)

    # --- loading -----------------------------------------------------------------------------------------------------

    def _fill(self, model: Any, state: dict[str, Any], *_: Any) -> None:
        """Before loading: initialize what the checkpoint lacks."""
        filled, self._new_heads = self._heads.filled(state, model.state_dict)
        state.update(filled)

    def _begin_heads(self, _: Any, __: Any) -> None:
        """After loading: initialize new draft output layers from the trunk's."""
        for block in self._new_heads:
            block.begin_head(self.head())
        self._new_heads = []
