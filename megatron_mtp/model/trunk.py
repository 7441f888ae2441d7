"""A trunk of Megatron's with an MTP block on its last pipeline stage; the trunk is a GPT here, a hybrid in hybrid.py.

The trunk is one of Megatron's model classes, built without Megatron's own MTP. On the stage that holds MTP it gets our
block and the shared embedding. Given an `Objective`, the last stage returns what the objective makes of the trunk's and
the depths' hidden states; without one it is the plain model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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

from megatron_mtp.data.batch import DepthBatch, LaterPositions, to_device
from megatron_mtp.drafters import DRAFTERS
from megatron_mtp.model.head import (
    DRAFT_VOCABULARY,
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
    Angles,
    AttentionInputs,
    Mixer,
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayerSubmodules,
    set_quantization,
)
from megatron_mtp.patches.saving import ABSENT
from megatron_mtp.registry import Imported

if TYPE_CHECKING:
    from megatron_mtp.model.drafter import Drafter, DrafterBlock


BLOCKS: "Imported[type[DrafterBlock]]" = Imported({row.name: row.block for row in DRAFTERS.values()})
"""Modules of drafters by kind."""

DRAFTER_BLOCK = "drafter_block"
"""The module of a drafter beside MTP layers."""

OWN_HEAD = "layers.0.head"
"""A drafter's rows of the draft vocabulary, within its block."""

NO_BACKWARD = -1
"""Id of autograd's task outside of a backward pass."""

Objective = Callable[[StageOutput], Any]
"""Called by the last stage with the hidden states; its result is the model's output."""


class MTPTrunk(LanguageModule):
    """The MTP block's part of a pipeline stage, whatever Megatron class the trunk is; to be put before that class.

    The stage holds a block where `mtp_submodules` is given and the stage is the one for it.
    """

    _read: tuple[int, ...] = ()
    _states_after: dict[int, Tensor]

    def __init__(
        self,
        *,
        mtp_submodules: MultiTokenPredictionLayerSubmodules | None,
        mtp_init: str = "random",
        mtp_init_seed: int = 0,
        absent_mtp_layers: tuple[int, ...] = (),
        train_only_mtp: bool = False,
        drafter: "Drafter | None" = None,
        beside: "Drafter | None" = None,
        beside_submodules: MultiTokenPredictionLayerSubmodules | None = None,
        lacks_drafter: bool = False,
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
        self._mtp_init, self._mtp_init_seed, self._absent = mtp_init, mtp_init_seed, absent_mtp_layers
        self._lacks_draft_vocabulary, self._lacks_drafter = absent_draft_vocabulary, lacks_drafter
        self.drafter_block: DrafterBlock | None = None
        self.mtp_process = mtp_submodules is not None and mtp_on_this_rank(
            layout=self.config.pipeline_model_parallel_layout,
            mtp_num_layers=self.config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=self.vp_stage,
        )
        if self.mtp_process:
            assert mtp_submodules is not None
            attach_embedding(self)
            of_block = self.pg_collection, self.vp_stage, draft_vocabulary

            def drafting(kind: "Drafter", submodules: MultiTokenPredictionLayerSubmodules) -> "DrafterBlock":
                return BLOCKS[kind.kind](kind, self.config, submodules, *of_block)

            if drafter is None:
                self.mtp = MultiTokenPredictionBlock(self.config, mtp_submodules, *of_block)
            else:
                self.mtp = drafting(drafter, mtp_submodules)
            if beside is not None:
                assert beside_submodules is not None
                self.drafter_block = drafting(beside, beside_submodules)
            set_quantization(self.mtp, self.config)
        if self.pre_process or self.post_process or self.mtp_process:
            self.setup_embeddings_and_output_layer()
        self.draft_vocabulary = None
        if draft_vocabulary is not None and self.post_process:
            ranks = self.pg_collection.tp.size()
            slice_size = self.vocab_size // ranks
            self.draft_vocabulary = DraftVocabulary(draft_vocabulary, slice_size, ranks, self.pg_collection.tp.rank())
        self.drafter = drafter
        if reading := drafter or beside:
            self._read_layers(reading.layers)
        if train_only_mtp:
            freeze_trunk(self)

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
        new_heads: list[DrafterBlock] = []
        if lacking and self.mtp_process:
            from megatron_mtp.model.initialize import fill_absent_layers

            own, filled, seed = self.state_dict(), dict(state_dict), self._mtp_init_seed
            if self._absent:
                filled = fill_absent_layers(filled, own, self.mtp, self._absent, self._mtp_init, seed)
            if self.drafter_block is not None and self._lacks_drafter:
                filled = fill_absent_layers(filled, own, self.drafter_block, (0,), "random", seed, DRAFTER_BLOCK)
            state_dict = {name: value for name, value in own.items() if name.startswith(lacking)} | filled
            drafters = {"mtp": self.mtp if self.drafter is not None else None, DRAFTER_BLOCK: self.drafter_block}
            new_heads = [one for name, one in drafters.items() if one and f"{name}.{OWN_HEAD}".startswith(lacking)]
        self._absent, self._lacks_draft_vocabulary, self._lacks_drafter = (), False, False
        loaded = super().load_state_dict(state_dict, strict=strict, **kwargs)
        for drafter in new_heads:
            drafter.begin_head(self.head())
        return loaded

    def _lacking(self) -> tuple[str, ...]:
        """Beginnings of the names of what the checkpoint that is about to be loaded lacks."""
        names = [f"mtp.layers.{index}." for index in self._absent]
        if 0 in self._absent or self._lacks_draft_vocabulary:
            names.append(DRAFT_VOCABULARY)
        if self._lacks_draft_vocabulary:  # then a drafter has no rows of its own either
            names += [f"mtp.{OWN_HEAD}", f"{DRAFTER_BLOCK}.{OWN_HEAD}", f"{DRAFTER_BLOCK}.draft_vocabulary"]
        if self._lacks_drafter:
            names.append(f"{DRAFTER_BLOCK}.")
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
        output_processor_context: DepthBatch | None = None,
        **trunk_outputs: Any,
    ) -> Any:
        """Called after the decoder, with everything that the trunk's forward knows."""
        if InferenceMode.is_active():  # Megatron's engine takes the last logits, and drafts after it has verified
            return super()._postprocess(hidden_states, **trunk_outputs)
        if self._stage_input is not None:
            hidden_states = answer_with_zeros(hidden_states, self._stage_input)
        depth_hidden: list[Tensor] = []
        confidence_DSB: Tensor | None = None
        beside: tuple[list[Tensor], Tensor | None] = [], None
        batch = output_processor_context
        if self.mtp_process and batch is not None:
            attention = AttentionInputs(**{name: trunk_outputs[name] for name in AttentionInputs.__annotations__})
            position_ids_BS = trunk_outputs["position_ids"]
            if self.drafter is not None:
                depth_hidden, confidence_DSB = self._drafted(self.mtp, batch, position_ids_BS, attention)
            else:
                depth_hidden = self.depth_states(hidden_states, batch, position_ids_BS, attention)
            if self.drafter is not None and self._stage_input is not None:
                depth_hidden[0] = answer_with_zeros(depth_hidden[0], self._stage_input)
            if self.drafter_block is not None and batch.beside is not None:
                beside = self._drafted(self.drafter_block, batch.beside, position_ids_BS, attention)
        if not self.post_process:
            if self._read:
                return torch.cat([hidden_states, self._read_states()], dim=-1) if self._states_after else hidden_states
            return torch.cat([hidden_states, *depth_hidden]) if depth_hidden else hidden_states
        if not self.mtp_process and self.config.mtp_num_layers and output_processor_context is not None:
            # The depths have a pipeline stage of their own, which has sent all hidden states as one.
            hidden_states, *depth_hidden = hidden_states.chunk(1 + self.config.mtp_num_layers)
        head = self.head(trunk_outputs["runtime_gather_output"])
        if output_processor is not None:
            depth_head = self.head(trunk_outputs["runtime_gather_output"], detached=self.config.mtp_detach_heads)
            depth_head = self.mtp.head_of(depth_head) if self.mtp_process else depth_head
            stage = StageOutput(hidden_states, depth_hidden, head, depth_head, batch, confidence_DSB)
            if self.drafter_block is not None and batch is not None:
                own = self.drafter_block.head_of(self.head(trunk_outputs["runtime_gather_output"], detached=True))
                stage = replace(stage, beside=StageOutput(hidden_states, beside[0], head, own, batch.beside, beside[1]))
            return output_processor(stage)
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

    def depth_states(
        self, hidden_SBH: Tensor, batch: DepthBatch, position_ids_BS: Tensor, attention: AttentionInputs
    ) -> list[Tensor]:
        """Hidden states of depth 1 .. D, from the trunk's; see `MultiTokenPredictionBlock`.

        Raises:
            ValueError: a drafter reads layers that did not run in the same forward pass.
        """
        if self.drafter is not None:
            return self._drafted(self.mtp, batch, position_ids_BS, attention)[0]
        shifted_in_DBS = ~batch.inside_DBS if self.config.num_moe_experts is not None else None
        return self.mtp(
            hidden_SBH,
            batch.tokens_DBS,
            position_ids_BS,
            self.embedding,
            attention,
            shifted_in_DBS,
            self._mixer(batch),
            self._later_angles(self.mtp, attention),
        )

    @property
    def depths(self) -> int:
        """D, of the stage that has them."""
        return int(self.mtp.depths)

    def states_for_loss(
        self, hidden_SBH: Tensor, batch: DepthBatch, packed: PackedSeqParams | None, length: int, is_apart: bool
    ) -> list[Tensor]:
        """Hidden states of the depths, for `loss_of_stage` in training/mtp_loss.py, which says what it gives."""
        turned = length if packed is None else packed.max_seqlen_q
        angles = self.rotary_angles(turned, packed_seq=packed is not None)[0] if self.turns_heads else None
        attention = AttentionInputs(rotary_pos_emb=angles, packed_seq_params=packed)
        position_ids_BS = to_device(batch.positions_S, hidden_SBH.device).expand_as(batch.labels_BS)
        before, self.config.mtp_detach_heads = self.config.mtp_detach_heads, is_apart
        try:
            return self.depth_states(hidden_SBH, batch, position_ids_BS, attention)
        finally:
            self.config.mtp_detach_heads = before

    def _drafted(
        self, block: Any, batch: DepthBatch, position_ids_BS: Tensor, attention: AttentionInputs
    ) -> tuple[list[Tensor], Tensor | None]:
        """Inputs of the head for a drafter's drafts, and their confidence; neither trains the trunk's embedding."""

        def embedding(**given: Any) -> Tensor:
            made_SBH: Tensor = self.embedding(**given)
            return made_SBH.detach()

        states_SBX = self._read_states()
        if DRAFTERS[block.drafter.kind].fills_blocks:
            made: tuple[list[Tensor], Tensor | None]
            made = block.blocks(states_SBX, batch, embedding, attention, self._whole_angles)
            return made
        angles = self._later_angles(block, attention)
        return block(states_SBX, batch.tokens_DBS, position_ids_BS, embedding, attention, angles=angles), None

    def _read_states(self) -> Tensor:
        """The states that a drafter reads, side by side; they are given once."""
        if not self._states_after:
            raise ValueError(
                "this model's drafter reads states of the trunk's layers, which only its own forward pass gives; train "
                "it by megatron-mtp train --drafter."
            )
        return torch.cat([self._states_after.pop(number) for number in sorted(self._states_after)], dim=-1)

    def _later_angles(self, block: MultiTokenPredictionBlock, attention: AttentionInputs) -> Angles | None:
        """The rotary angles of passes that share keys; None where all passes stand at the same positions."""
        if not block.shares_kv or attention.rotary_pos_emb is None:
            return None
        is_packed = attention.packed_seq_params is not None
        ranks = 1 if is_packed else self.pg_collection.cp.size()
        whole = ranks * attention.rotary_pos_emb.size(0)
        return lambda later: self.rotary_angles(whole, offset=later, packed_seq=is_packed)[0]

    def _whole_angles(self, length: int) -> Tensor:
        """The rotary angles of the first positions of whole sequences, also under context parallelism."""
        return self.rotary_angles(length, packed_seq=True)[0]

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

    def _mixer(self, batch: DepthBatch) -> Mixer | None:
        """The mixer of this rank's positions, which sequence parallelism cuts once more."""
        if batch.ages_DS is None:
            return None
        group, positions_S = self.pg_collection.cp, batch.positions_S
        ages_DS, inside_DBS = batch.ages_DS, batch.inside_DBS
        if self.config.sequence_parallel:
            ranks, rank = self.pg_collection.tp.size(), self.pg_collection.tp.rank()
            positions_S, ages_DS = positions_S.chunk(ranks)[rank], ages_DS.chunk(ranks, dim=1)[rank]
            group, inside_DBS = self.pg_collection.tp_cp, inside_DBS.chunk(ranks, dim=2)[rank]
        return Mixer(ages_DS, inside_DBS, LaterPositions(positions_S.contiguous(), len(ages_DS) - 1, group))

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
    return (module for name, module in model.named_children() if name not in ("mtp", DRAFTER_BLOCK))


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
