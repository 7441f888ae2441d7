"""The MTP block: the trunk's hidden state in, one per depth out (DeepSeek-V3, arXiv:2412.19437, eq. 21-23).

Depth d = 1 .. D at position i, h_0 the trunk's hidden state after its final norm:

    x   = eh_proj([enorm(embedding(t_{i+d})); hnorm(h_{d-1})])     embedding half first
    h_d = final_layernorm(tf_layer(x))                             what depth d+1 and the output head receive

The parallel architecture (Gloeckle et al., arXiv:2404.19737) has h_d = final_layernorm(tf_layer_d(h_0)) instead.

The modules come from a spec, so that the same classes hold TE modules on a GPU and portable ones elsewhere. The block
knows neither the trunk's class nor the loss. Letters in names: D depths, S sequence, B batch, H hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import DepthBatch, LaterPositions, to_device
from megatron_mtp.model.head import Head
from megatron_mtp.model.shared_keys import FirstPassKeys, SharingAttention, sharing

SHARDED_TF_LAYER = "transformer_layer"
"""The name of `tf_layer` in checkpoints, which Megatron's own MTP uses too."""

Turns = Tensor | tuple[Tensor, Tensor]
"""Megatron's rotary angles of all positions, or those of queries and of keys."""

Angles = Callable[[int], Turns]
"""From a number of positions to the angles of a pass whose queries stand so many positions later."""


@dataclass(frozen=True)
class MultiTokenPredictionLayerSubmodules:
    """Modules of a depth; the embedding-side modules are None for a parallel head.

    `tf_layer` is one transformer layer, or a stack of layers with the interface of one; `sharded_name` is its name in
    checkpoints, which are those of Megatron's own MTP. With `shares_kv` later passes of a repeated layer attend to pass
    1's keys and values, and if `has_chain` to those of their own chain (shared_keys.py).
    """

    tf_layer: ModuleSpec
    final_layernorm: Callable[..., torch.nn.Module]
    enorm: Callable[..., torch.nn.Module] | None = None
    hnorm: Callable[..., torch.nn.Module] | None = None
    eh_proj: type | None = None
    sharded_name: str = SHARDED_TF_LAYER
    shares_kv: bool = False
    has_chain: bool = True


def mtp_layer_submodules(
    tf_layer: ModuleSpec, architecture: str, use_te: bool, sharded_name: str = SHARDED_TF_LAYER
) -> MultiTokenPredictionLayerSubmodules:
    """The spec of one depth around an inner layer or stack of layers, for TE or for portable modules."""
    backend: BackendSpecProvider = LocalSpecProvider()
    if use_te:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = TESpecProvider()
    norm = backend.layer_norm()
    made = MultiTokenPredictionLayerSubmodules(tf_layer, final_layernorm=norm, sharded_name=sharded_name)
    if architecture == "parallel":
        return made
    return replace(made, enorm=norm, hnorm=norm, eh_proj=backend.column_parallel_linear())


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of a transformer layer beside its hidden state: the same for every depth of a microbatch."""

    attention_mask: Tensor | None = None
    rotary_pos_emb: Turns | None = None
    rotary_pos_cos: Tensor | None = None
    rotary_pos_sin: Tensor | None = None
    packed_seq_params: PackedSeqParams | None = None

    def at_pass(self, index: int, angles: Angles | None) -> "AttentionInputs":
        """The inputs of pass `index`, from 0, which stands so many positions later where there are `angles`."""
        return self if angles is None or not index else replace(self, rotary_pos_emb=angles(index))


@dataclass(frozen=True)
class TrunkOutput:
    """What a head reads of the trunk's forward pass.

    Attributes:
        hidden_SBH: after the trunk's final norm.
        position_ids_BS: of the trunk's tokens.
        embedding: the trunk's, called with `input_ids` and `position_ids`.
        attention: of the trunk's layers.
        angles: Megatron's rotary angles, from a number of positions and its further arguments.
        read_SBX: states after the layers that a drafter reads, side by side; None without them.
        is_apart: whether no head may train the trunk and its embedding.
    """

    hidden_SBH: Tensor
    position_ids_BS: Tensor
    embedding: Callable[..., Tensor]
    attention: AttentionInputs
    angles: Callable[..., Tensor]
    read_SBX: Tensor | None = None
    is_apart: bool = False

    def frozen_embedding(self, **given: Any) -> Tensor:
        """The embedding, which is not trained."""
        return self.embedding(**given).detach()


def is_detached(config: TransformerConfig) -> bool:
    """Whether `--mtp-detach-heads` is on, which releases before 0.19 do not have."""
    return bool(getattr(config, "mtp_detach_heads", False))


def whole_states(part: Tensor, config: TransformerConfig, group: ProcessGroup) -> Tensor:
    """States [S, B, H] of a column-parallel projection's output [S, B, H / ranks]; this rank's positions under SP."""
    whole_SBH = tensor_parallel.gather_from_tensor_model_parallel_region(part, group=group)
    if config.sequence_parallel:
        return tensor_parallel.scatter_to_sequence_parallel_region(whole_SBH, group=group)
    return whole_SBH


class MultiTokenPredictionLayer(MegatronModule):
    """One depth: from the hidden state of the depth before (and the embedding of the token it adds) to its own."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.sharded_name = submodules.sharded_name
        norm: dict[str, Any] = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        if submodules.eh_proj is not None:
            assert submodules.enorm is not None
            assert submodules.hnorm is not None
            self.enorm = submodules.enorm(**norm)
            self.hnorm = submodules.hnorm(**norm)
            self.eh_proj = build_module(
                submodules.eh_proj,
                2 * config.hidden_size,
                config.hidden_size,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="mtp_eh_proj",
                tp_group=pg_collection.tp,
            )
        self.tf_layer = build_module(
            submodules.tf_layer,
            config=config,
            vp_stage=vp_stage,
            layer_number=layer_number,
            is_mtp_layer=True,
            pg_collection=pg_collection,
        )
        self.final_layernorm = submodules.final_layernorm(**norm)
        self.register_load_state_dict_pre_hook(_read_other_names)

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """`tf_layer`, by the name under which Megatron looks for layers to record as Transformer Engine's CUDA graphs.

        With experts it is this module, which is not recorded: graphs would drop the padding mask of the router.
        """
        return self if any(isinstance(module, MoELayer) for module in self.tf_layer.modules()) else self.tf_layer

    def forward(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor | None,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """The hidden state of this depth.

        Args:
            hidden_SBH: of the depth before, after its final norm; sequence-parallel slices where that is on.
            embedded_SBH: embedding of the token d positions later; None for a parallel head.
            padding_mask_BS: True where the position was shifted in from outside; MoE routers leave it out.
        """
        recomputes = self.training and self.config.recompute_granularity == "full"
        run = self._checkpointed if recomputes else self._run
        return run(hidden_SBH, embedded_SBH, attention, padding_mask_BS)

    def forward_single_position(
        self,
        hidden_states: Tensor,
        next_token_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
    ) -> Tensor:
        """A draft of every request, as Megatron's `DynamicInferenceEngine` calls for it: without earlier positions.

        That engine keeps no keys and values of the MTP layers. A request attends to itself alone: in Megatron's own
        layer the requests of a step attend to one another.

        Args:
            hidden_states: [N, B, H], the state of each request that its draft continues from.
            next_token_ids: [B, N], the newest token of each.
            position_ids: [B, N], of these tokens.
            embedding: the shared embedding.

        Returns:
            The depth's states [N, B, H], after its final norm.

        Raises:
            ValueError: the depth is a parallel head or has layers with a state, or sequence parallelism cuts requests.
        """
        self._check_single_position()
        embedded_NBH = embedding(input_ids=next_token_ids, position_ids=position_ids)
        rows = 1, -1, hidden_states.size(-1)  # every request is a text of one position
        made = self(hidden_states.reshape(rows), embedded_NBH.reshape(rows), AttentionInputs())
        return made.view_as(hidden_states)

    def _check_single_position(self) -> None:
        if not hasattr(self, "eh_proj"):
            raise ValueError(
                "Megatron's inference engine drafts with sequential MTP layers, and these are parallel heads; use "
                "megatron-mtp generate."
            )
        from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols  # not there before 0.18

        if {Symbols.MAMBA, Symbols.GDN} & set(getattr(self.tf_layer, "layer_type_list", ())):
            raise ValueError(
                "Megatron's inference engine keeps no states of the MTP layers, and these have Mamba or Gated DeltaNet "
                "layers; use megatron-mtp generate."
            )
        if self.config.sequence_parallel:
            raise ValueError(
                "sequence parallelism would cut the requests that Megatron's inference engine drafts for; load the "
                "model without --sequence-parallel."
            )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Entries under the keys that Megatron's own MTP writes, so that checkpoints pass in both directions."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        apply_prefix_mapping(entries, {f"{prefix}tf_layer.": f"{prefix}{self.sharded_name}."})
        return entries

    def _checkpointed(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor | None,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None,
    ) -> Tensor:
        keeper: Any = getattr(self.tf_layer, "self_attention", None)
        passes = keeper.passes if isinstance(keeper, FirstPassKeys) else None
        inputs = self.config, self.tp_group, hidden_SBH, embedded_SBH, padding_mask_BS

        def run(hidden: Tensor, embedded: Tensor | None, mask: Tensor | None) -> Tensor:
            return self._run(hidden, embedded, attention, mask)

        if passes is None:
            return checkpointed(run, *inputs)
        number = len(passes) + 1

        def run_pass(hidden: Tensor, embedded: Tensor | None, mask: Tensor | None, *first: Tensor) -> Any:
            with keeper.at_pass(number, first) as kept:
                return run(hidden, embedded, mask), *kept[-1]

        state_SBH, *first = checkpointed(run_pass, *inputs, *(passes[0] if passes else ()))
        passes.append(tuple(first))
        return state_SBH

    def _run(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor | None,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None,
    ) -> Tensor:
        # Each sequence-parallel rank has other positions, and needs other random numbers for dropout.
        with tensor_parallel.get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            if embedded_SBH is not None:
                with get_fp8_context(self.config):
                    hidden_SBH = self._merge(embedded_SBH, hidden_SBH)
            with get_fp8_context(self.config):
                hidden_SBH, _ = self.tf_layer(
                    hidden_states=hidden_SBH,
                    attention_mask=attention.attention_mask,
                    rotary_pos_emb=attention.rotary_pos_emb,
                    rotary_pos_cos=attention.rotary_pos_cos,
                    rotary_pos_sin=attention.rotary_pos_sin,
                    packed_seq_params=attention.packed_seq_params,
                    padding_mask=padding_mask_BS,
                )
        # The pipeline schedule frees the output after sending it, which a view would not allow.
        return make_viewless_tensor(self.final_layernorm(hidden_SBH), requires_grad=True, keep_graph=True)

    def _merge(self, embedded_SBH: Tensor, hidden_SBH: Tensor) -> Tensor:
        both_SB2H = torch.cat((self.enorm(embedded_SBH), self.hnorm(hidden_SBH)), dim=-1)
        merged, _ = self.eh_proj(both_SB2H)
        return whole_states(merged, self.config, self.tp_group)


def _read_other_names(layer: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept the names of `tf_layer` in state dicts of Megatron's own MTP, which differ by release."""
    for name in list(state):
        for other in ("transformer_layer.", "mtp_model_layer."):
            if name.startswith(prefix + other):
                state[f"{prefix}tf_layer.{name.removeprefix(prefix + other)}"] = state.pop(name)


class MultiTokenPredictionBlock(MegatronModule):
    """D depths, one after another; with `mtp_use_repeated_layer` one layer serves them all.

    Attributes:
        draft_vocabulary: [N], int64, ascending: the token of every draft index, kept with the layers in checkpoints;
            None where they draft all tokens.
        shares_kv: whether later passes of a repeated layer attend to pass 1's keys and values.
        has_chain: whether they attend to those of their own chain too.
        drafter: settings of a drafter (`drafter.py`); None of MTP layers.
        absent: beginnings of the names of what the checkpoint that is about to be loaded lacks of the block.
    """

    draft_vocabulary: Tensor | None
    drafter: Any = None
    absent: tuple[str, ...] = ()

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        draft_vocabulary: Tensor | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.mtp_num_layers is not None
        self.register_buffer("draft_vocabulary", draft_vocabulary)
        self.depths = config.mtp_num_layers
        self.groups, self.tp_group = pg_collection, pg_collection.tp
        self.sequential = submodules.eh_proj is not None
        self.shares_kv, self.has_chain = submodules.shares_kv, submodules.has_chain
        physical = 1 if config.mtp_use_repeated_layer else self.depths
        with get_fp8_context(config, is_init=True):  # weights in FP8 with --fp8-param-gather, as the trunk's are
            self.layers = torch.nn.ModuleList(
                self.make_layer(submodules, number, pg_collection, vp_stage) for number in range(1, physical + 1)
            )
        self._sharing = [one for one in self.modules() if isinstance(one, SharingAttention | FirstPassKeys)]
        if config.mtp_detach_heads:
            for parameter in self.parameters():
                parameter.grad_norm_group = "mtp"  # Megatron's optimizer clips such gradients by themselves

    def make_layer(self, *args: Any) -> MegatronModule:
        """A layer, from what its class takes after the configuration."""
        return MultiTokenPredictionLayer(self.config, *args)

    @property
    def is_apart(self) -> bool:
        """Return whether the drafts train nothing of the trunk, its embedding and its head among it."""
        return is_detached(self.config)

    def head_of(self, head: Head) -> Head:
        """The head that drafts, from the trunk's: the same."""
        return head

    def begin_head(self, head: Head) -> None:
        """Make new rows of the head that drafts, from the trunk's: there are none of its own."""

    def drafts(self, trunk: "TrunkOutput", batch: DepthBatch) -> tuple[list[Tensor], Tensor | None]:
        """Inputs of the head that drafts, one a depth, and the logits of their confidence, if there is one."""
        shifted_in_DBS = ~batch.inside_DBS if self.config.num_moe_experts is not None else None
        given = batch.tokens_DBS, trunk.position_ids_BS, trunk.embedding, trunk.attention, shifted_in_DBS
        return self(trunk.hidden_SBH, *given, self._mixer(batch), self.later_angles(trunk), trunk.is_apart), None

    def later_angles(self, trunk: "TrunkOutput") -> Angles | None:
        """The rotary angles of passes that share keys; None where all passes stand at the same positions."""
        attention = trunk.attention
        of_keys = attention.rotary_pos_emb
        if not self.shares_kv or not isinstance(of_keys, Tensor):
            return None
        is_packed = attention.packed_seq_params is not None
        whole = (1 if is_packed else self.groups.cp.size()) * of_keys.size(0)

        def turned(later: int) -> Turns:
            of_queries = trunk.angles(whole, offset=later, packed_seq=is_packed)
            return of_queries if self.has_chain else (of_queries, of_keys)

        return turned

    def _mixer(self, batch: DepthBatch) -> "Mixer | None":
        """The mixer of this rank's positions, which sequence parallelism cuts once more."""
        if batch.ages_DS is None:
            return None
        group, positions_S = self.groups.cp, batch.positions_S
        ages_DS, inside_DBS = batch.ages_DS, batch.inside_DBS
        if self.config.sequence_parallel:
            ranks, rank = self.groups.tp.size(), self.groups.tp.rank()
            positions_S, ages_DS = positions_S.chunk(ranks)[rank], ages_DS.chunk(ranks, dim=1)[rank]
            group, inside_DBS = self.groups.tp_cp, inside_DBS.chunk(ranks, dim=2)[rank]
        return Mixer(ages_DS, inside_DBS, LaterPositions(positions_S.contiguous(), len(ages_DS) - 1, group))

    @property
    def mtp_use_repeated_layer(self) -> bool:
        """Return whether one layer serves all depths; Megatron's inference engine asks the block."""
        return bool(self.config.mtp_use_repeated_layer)

    def forward(
        self,
        hidden_SBH: Tensor,
        tokens_DBS: Tensor,
        position_ids_BS: Tensor,
        embedding: Callable[..., Tensor],
        attention: AttentionInputs,
        padding_mask_DBS: Tensor | None = None,
        mixer: "Mixer | None" = None,
        angles: Angles | None = None,
        is_apart: bool = False,
    ) -> list[Tensor]:
        """Hidden states of depth 1 .. D, each [S, B, H].

        Args:
            hidden_SBH: the trunk's, after its final norm.
            tokens_DBS: at depth d and position i the token t_{i+d}, 0 where it lies outside the document.
            position_ids_BS: position ids; they are not shifted.
            embedding: the shared embedding, called with `input_ids` and `position_ids`.
            padding_mask_DBS: True where the position was shifted in from outside.
            mixer: which states the depths of a chain continue from; None for those of the depths before them.
            angles: the rotary angles of later positions, where passes that share keys stand.
            is_apart: whether the trunk's states and the embedding get no gradient, whatever the configuration says.

        Raises:
            ValueError: passes were trained to share keys, and the layer's attention cannot do that.
        """
        if self.shares_kv and not self._sharing:
            shares, whose = ("shares", "Transformer Engine's") if self.has_chain else ("first-pass", "this kind of")
            raise ValueError(
                f"the MTP layers were trained with --mtp-repeated-layer-{shares}-kv, which {whose} attention cannot "
                "do; build the model with --transformer-impl local."
            )
        masks = own_masks(padding_mask_DBS, self.depths, self.config, self.tp_group)
        is_apart = is_apart or is_detached(self.config)
        if not self.sequential:
            hidden_SBH = hidden_SBH.detach() if is_apart else hidden_SBH
            return [layer(hidden_SBH, None, attention, mask) for layer, mask in zip(self.layers, masks, strict=True)]
        tokens = tokens_DBS, [position_ids_BS] * self.depths, embedding
        with sharing(self._sharing) if self._sharing else nullcontext():
            return chain([*self.layers], hidden_SBH, *tokens, attention, masks, is_apart, mixer, angles)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Entries of every layer under `layers.{depth - 1}`, and the draft vocabulary; none is split over stages.

        What the checkpoint that is about to be loaded lacks has a key that says so.
        """
        entries = self.entries(prefix, sharded_offsets, metadata)
        if self.absent:
            from megatron_mtp.megatron.patches.saving import ABSENT  # a model with attached layers needs no patches

            for name, entry in entries.items():
                if name.removeprefix(prefix).startswith(self.absent):
                    entry.key = ABSENT + entry.key
        return entries

    def entries(
        self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any] | None
    ) -> ShardedStateDict:
        """The same, as if the checkpoint lacked nothing."""
        own = {} if self.draft_vocabulary is None else {"draft_vocabulary": self.draft_vocabulary}
        entries: ShardedStateDict = make_sharded_tensors_for_checkpoint(own, prefix, sharded_offsets=sharded_offsets)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, MegatronModule)
            entries.update(layer.sharded_state_dict(f"{prefix}layers.{index}.", sharded_offsets, metadata))
        return entries


Layer = Callable[[Tensor, Tensor, AttentionInputs, Tensor | None], Tensor]
"""A depth: the state and the embedding that it reads, both [S, B, H], attention, mask [B, S]; see the forward above."""


def chain(
    layers: Sequence[Layer],
    hidden_SBH: Tensor,
    tokens_DBS: Tensor,
    positions: Sequence[Tensor],
    embedding: Callable[..., Tensor],
    attention: AttentionInputs,
    masks: Sequence[Tensor | None],
    is_apart: bool,
    mixer: "Mixer | None" = None,
    angles: Angles | None = None,
) -> list[Tensor]:
    """Hidden states of depth 1 .. D, each [S, B, H]: layers one after another, the first again after the last.

    Args:
        layers: of any class; a layer that serves all depths is given once.
        positions: of the tokens of every depth, [B, S].
        masks: of every depth (`own_masks`).
        is_apart: whether the trunk's states and the embedding get no gradient.
        hidden_SBH, tokens_DBS, embedding, attention, mixer, angles: see `MultiTokenPredictionBlock`.
    """
    state_SBH, states = hidden_SBH.detach() if is_apart else hidden_SBH, list[Tensor]()
    for depth, mask_BS in enumerate(masks):
        embedded_SBH = embedding(input_ids=tokens_DBS[depth], position_ids=positions[depth])
        if is_apart:
            embedded_SBH = embedded_SBH.detach()
        read_SBH = state_SBH if mixer is None else mixer.next_input(state_SBH)
        state_SBH = layers[depth % len(layers)](read_SBH, embedded_SBH, attention.at_pass(depth, angles), mask_BS)
        states.append(state_SBH)
    return states


def own_masks(
    padding_mask_DBS: Tensor | None, depths: int, config: TransformerConfig, tp_group: ProcessGroup
) -> list[Tensor | None]:
    """The mask of every depth at the positions that this rank has, which sequence parallelism cuts."""
    if padding_mask_DBS is None:
        return [None] * depths
    if config.sequence_parallel:
        padding_mask_DBS = padding_mask_DBS.chunk(tp_group.size(), dim=2)[tp_group.rank()]
    return [*padding_mask_DBS]


def checkpointed[T](
    run: Callable[..., T], config: TransformerConfig, tp_group: ProcessGroup, hidden_SBH: Tensor, *others: Tensor | None
) -> T:
    """Result of `run` on the states and others; the backward pass computes it again."""
    if torch.is_grad_enabled() and not hidden_SBH.requires_grad:
        # Behind a detached or frozen trunk no input requires a gradient; then the output would have none either.
        hidden_SBH = hidden_SBH.detach().requires_grad_()
    inputs = hidden_SBH, *others
    # --distribute-saved-activations would leave a slice in the input, which the losses need whole.
    distributes, rng_tracker = False, tensor_parallel.get_cuda_rng_tracker
    if config.fp8 or config.fp4:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        # Delayed scaling stashes its amax history only if FP8 is on where the checkpoint begins.
        delayed = config.fp8 and config.fp8_recipe == Fp8Recipe.delayed
        with get_fp8_context(config) if delayed else nullcontext():
            return te_checkpoint(run, distributes, rng_tracker, tp_group, *inputs)
    return tensor_parallel.checkpoint(run, distributes, *inputs)


def set_quantization(block: torch.nn.Module, config: TransformerConfig) -> None:
    """Hand the MTP layers' TE modules their part of the quantization recipe, as Megatron does for the trunk's."""
    for name, module in block.named_modules(prefix="mtp"):
        if hasattr(module, "finish_init"):
            module.finish_init(get_quant_config_or_none(name, config.quant_recipe))


# --- hidden-state mixing ---------------------------------------------------------------------------------------------
#
# In training with --mtp-hsm, the states that a depth continues from are of different depths.
#
# Depth d at position i reads the state of depth d - 1, which predicts token i + d. The state of depth d - 1 - k at
# position i + k predicts the same token: it is k positions later and k depths shallower. One of the d states is taken,
# each with the same probability. Depth 3 has three to choose from, and at the end of a document fewer:
#
#     position              0        1        2        3        4 |
#     k = 0, the newest     h_2(0)   h_2(1)   h_2(2)   h_2(3)   h_2(4)
#     k = 1                 h_1(1)   h_1(2)   h_1(3)   h_1(4)   -
#     k = 2, the trunk's    h_0(2)   h_0(3)   h_0(4)   -        -
#
# Where the choice falls on one that is beyond the end, the newest is taken.


@dataclass
class Mixer:
    """Inputs of the depths in one forward pass.

    Attributes:
        ages_DS: from `drawn_ages`, on the device of the states.
        inside_DBS: whether the position d later is in the same document.
        later: where it is.
        states: of the trunk and of every depth so far, each with copies from other ranks.
    """

    ages_DS: Tensor
    inside_DBS: Tensor
    later: LaterPositions
    states: list[Tensor] = field(default_factory=list)

    def next_input(self, state_SBH: Tensor) -> Tensor:
        """The input of the next depth, given the newest state: called for depth 1 with the trunk's, and so on."""
        mixed_SBH = state_SBH
        ages_S = self.ages_DS[len(self.states)]
        for age, older_TBH in enumerate(reversed(self.states), start=1):
            takes_SB = (ages_S == age).unsqueeze(1) & self.inside_DBS[age - 1].t()
            later_S = to_device(self.later.where(age), older_TBH.device)
            mixed_SBH = torch.where(takes_SB.unsqueeze(2), older_TBH[later_S], mixed_SBH)
        if len(self.states) + 1 < len(self.ages_DS):
            self.states.append(self.later.lookup(state_SBH))
        return mixed_SBH
