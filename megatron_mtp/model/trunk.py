"""A trunk of Megatron's with an MTP block on its last pipeline stage; the trunk is a GPT here, a hybrid in hybrid.py.

The trunk is one of Megatron's model classes, built without Megatron's own MTP. On the stage that holds MTP it gets our
block and the shared embedding. Given an `Objective`, the last stage returns what the objective makes of the trunk's and
the depths' hidden states; without one it is the plain model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from torch import Tensor, nn

from megatron_mtp.config import HEADS
from megatron_mtp.data.batch import DepthBatch, to_device
from megatron_mtp.drafters import DRAFTERS
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
from megatron_mtp.model.mtp import (
    AttentionInputs,
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayerSubmodules,
    TrunkOutput,
    set_quantization,
)
from megatron_mtp.patches.saving import ABSENT
from megatron_mtp.registry import Imported

if TYPE_CHECKING:
    from megatron_mtp.model.drafter import Drafter, DrafterBlock


BLOCKS: "Imported[type[DrafterBlock]]" = Imported({row.name: row.block for row in DRAFTERS.values()})
"""Modules of drafters by kind."""

OWN_HEAD = "layers.0.head"
"""A drafter's rows of the draft vocabulary, within its block."""

NO_BACKWARD = -1
"""Id of autograd's task outside of a backward pass."""

Objective = Callable[[StageOutput], Any]
"""Called by the last stage with the hidden states; its result is the model's output."""


@dataclass(frozen=True)
class HeadPlan:
    """How a stage makes a draft head.

    Attributes:
        name: of its module.
        block: makes it, from the arguments of `MultiTokenPredictionBlock`.
        layer: the spec of its layers.
        reads: numbers of the trunk's layers whose states it reads, from 1.
        absent: its layers that the checkpoint which is about to be loaded lacks.
        init, seed: how these are made (`initialize.py`).
    """

    name: str
    block: Callable[..., MultiTokenPredictionBlock]
    layer: MultiTokenPredictionLayerSubmodules
    reads: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    init: str = "random"
    seed: int = 0


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

    _read: tuple[int, ...] = ()
    _states_after: dict[int, Tensor]

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
        self._plans, self._lacks_draft_vocabulary = tuple(heads), absent_draft_vocabulary
        self.mtp_process = bool(heads) and mtp_on_this_rank(
            layout=self.config.pipeline_model_parallel_layout,
            mtp_num_layers=self.config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=self.vp_stage,
        )
        if self.mtp_process:
            attach_embedding(self)
            for plan in heads:
                block = plan.block(self.config, plan.layer, self.pg_collection, self.vp_stage, draft_vocabulary)
                set_quantization(block, self.config)
                setattr(self, plan.name, block)
        if self.pre_process or self.post_process or self.mtp_process:
            self.setup_embeddings_and_output_layer()
        self.draft_vocabulary = None
        if draft_vocabulary is not None and self.post_process:
            ranks = self.pg_collection.tp.size()
            slice_size = self.vocab_size // ranks
            self.draft_vocabulary = DraftVocabulary(draft_vocabulary, slice_size, ranks, self.pg_collection.tp.rank())
        if read := sorted({number for plan in heads for number in plan.reads}):
            self._read_layers(tuple(read))
        if train_only_mtp:
            freeze_trunk(self)

    @property
    def heads(self) -> list[MultiTokenPredictionBlock]:
        """The draft heads that this stage holds."""
        return [getattr(self, plan.name) for plan in self._plans] if self.mtp_process else []

    @property
    def drafter(self) -> "Drafter | None":
        """The settings of the first head, if that is a drafter."""
        return self.heads[0].drafter if self.heads else None

    def _read_layers(self, numbers: tuple[int, ...]) -> None:
        """Keep what these layers return in a forward pass, which a drafter reads; number n is the n-th layer.

        A pipeline stage has some of them. It gets the states after layers before its own beside its input, and sends
        them on with those of its own layers.
        """
        self._read, self._states_after = numbers, {}
        self.config.variable_seq_lengths = self.pg_collection.pp.size() > 1  # stages send tensors of any width

        def keep(layer: Any, _: Any, made: Any) -> None:
            if torch._C._current_graph_task_id() != NO_BACKWARD:
                return  # a layer that is recomputed; nobody would take its states
            self._states_after[layer.layer_number] = (made[0] if isinstance(made, tuple) else made).detach()

        for layer in self.decoder.layers:
            if layer.layer_number in numbers:
                layer.register_forward_hook(keep)

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
        given = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        if self._read and given is not None:
            input_tensor, *before = given.split(self.config.hidden_size, dim=-1)
            self._states_after.update(zip(self._read, (one.detach() for one in before), strict=False))
        super().set_input_tensor(input_tensor)

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
        lacking = self._lacking()
        new_heads: list[MultiTokenPredictionBlock] = []
        if lacking and self.heads:
            from megatron_mtp.model.initialize import fill_absent_layers

            own, filled = self.state_dict(), dict(state_dict)
            for plan, head in zip(self._plans, self.heads, strict=True):
                filled = fill_absent_layers(filled, own, head, plan.absent, plan.init, plan.seed, plan.name)
                if f"{plan.name}.{OWN_HEAD}".startswith(lacking):
                    new_heads.append(head)
            state_dict = {name: value for name, value in own.items() if name.startswith(lacking)} | filled
        self._plans = tuple(replace(plan, absent=()) for plan in self._plans)
        self._lacks_draft_vocabulary = False
        loaded = super().load_state_dict(state_dict, strict=strict, **kwargs)
        for head in new_heads:
            head.begin_head(self.head())
        return loaded

    def _lacking(self) -> tuple[str, ...]:
        """Beginnings of the names of what the checkpoint that is about to be loaded lacks."""
        names = []
        for plan in self._plans:
            names += [f"{plan.name}.layers.{index}." for index in plan.absent]
            if 0 in plan.absent or self._lacks_draft_vocabulary:
                names.append(f"{plan.name}.draft_vocabulary")
            if self._lacks_draft_vocabulary:  # then a drafter has no rows of its own either
                names.append(f"{plan.name}.{OWN_HEAD}")
        return tuple(names)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Megatron's; what is absent from the checkpoint that is about to be loaded has a key that says so."""
        entries = super().sharded_state_dict(prefix, *args, **kwargs)
        absent = tuple(prefix + name for name in self._lacking())
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
        batches = output_processor_context
        made: list[tuple[list[Tensor], Tensor | None]] = []
        if self.heads and batches is not None:
            attention = AttentionInputs(**{name: trunk_outputs[name] for name in AttentionInputs.__annotations__})
            trunk = self._output(hidden_states, trunk_outputs["position_ids"], attention)
            made = [head.drafts(trunk, batch) for head, batch in zip(self.heads, batches, strict=True)]
            if self._stage_input is not None:
                for states, _ in made:
                    states[0] = answer_with_zeros(states[0], self._stage_input)
        if not self.post_process:
            if self._read:
                return torch.cat([hidden_states, self._read_states()], dim=-1) if self._states_after else hidden_states
            sent = [state for states, _ in made for state in states]
            return torch.cat([hidden_states, *sent]) if sent else hidden_states
        gathers, drafted = trunk_outputs["runtime_gather_output"], list[Drafted]()
        if not self.heads and self._plans and batches is not None:
            # The depths have a pipeline stage of their own, which has sent all hidden states as one.
            hidden_states, *states = hidden_states.chunk(1 + self.config.mtp_num_layers)
            drafted = [Drafted(states, self.head(gathers, detached=self.config.mtp_detach_heads), batches[0])]
        head = self.head(gathers)
        if output_processor is not None:
            for block, batch, (states, confidence_DSB) in zip(self.heads, batches or (), made, strict=False):
                own = block.head_of(self.head(gathers, detached=block.is_apart))
                drafted.append(Drafted(states, own, batch, confidence_DSB))
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

    def states_for_loss(
        self, hidden_SBH: Tensor, batch: DepthBatch, packed: PackedSeqParams | None, length: int, is_apart: bool
    ) -> list[Tensor]:
        """Hidden states of the depths, for `loss_of_stage` in losses/mtp_loss.py, which says what it gives."""
        turned = length if packed is None else packed.max_seqlen_q
        angles = self.rotary_angles(turned, packed_seq=packed is not None)[0] if self.turns_heads else None
        attention = AttentionInputs(rotary_pos_emb=angles, packed_seq_params=packed)
        position_ids_BS = to_device(batch.positions_S, hidden_SBH.device).expand_as(batch.labels_BS)
        before, self.config.mtp_detach_heads = self.config.mtp_detach_heads, is_apart
        try:
            return self.heads[0].drafts(self._output(hidden_SBH, position_ids_BS, attention), batch)[0]
        finally:
            self.config.mtp_detach_heads = before

    def _output(self, hidden_SBH: Tensor, position_ids_BS: Tensor, attention: AttentionInputs) -> TrunkOutput:
        """What the heads read of a forward pass."""
        read_SBX = self._read_states() if self._read and self._states_after else None
        return TrunkOutput(hidden_SBH, position_ids_BS, self.embedding, attention, self._angles, read_SBX)

    def _angles(self, length: int, **others: Any) -> Tensor:
        return self.rotary_angles(length, **others)[0]

    def _read_states(self) -> Tensor:
        """The states that a drafter reads, side by side; they are given once."""
        return torch.cat([self._states_after.pop(number) for number in sorted(self._states_after)], dim=-1)

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


class TrunkSchedulePlan(TransformerModelChunkSchedulePlan):
    """Megatron's, which takes the trunk's layers apart; the MTP block runs whole after them, in `_postprocess`."""

    def _build_layer_schedule_plan(self, module: nn.Module | None, *streams: Any) -> None:
        if not isinstance(module, MultiTokenPredictionBlock):
            super()._build_layer_schedule_plan(module, *streams)


# --- a trunk that stays as it was loaded (--mtp-train-only) ----------------------------------------------------------


def freeze_trunk(model: nn.Module) -> None:
    """Turn gradients off for all but the MTP block: layers, norms, embedding and head, and the embedding's copy."""
    for module in trunk_modules(model):
        module.requires_grad_(False)


def trunk_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a stage that do not draft."""
    return (module for name, module in model.named_children() if name not in HEADS)


def answer_with_zeros(hidden_SBH: Tensor, stage_input_SBH: Tensor) -> Tensor:
    """The hidden state [S, B, H]; its backward pass gives the stage's input [S, B, ..] a gradient of zeros.

    The pipeline's schedule waits for a gradient from every stage but the first, also where nothing is trained.
    """
    apply: Callable[[Tensor, Tensor], Tensor] = _ZeroGradient.apply  # torch types it from 2.15 on
    return apply(hidden_SBH, stage_input_SBH)


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_SBH: Tensor, stage_input_SBH: Tensor) -> Tensor:
        ctx.like = stage_input_SBH.shape, stage_input_SBH.dtype, stage_input_SBH.device
        return hidden_SBH.clone()  # a view could not be freed by the schedule

    @staticmethod
    def backward(ctx: Any, gradient_SBH: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradient_SBH, torch.zeros(shape, dtype=dtype, device=device)
