"""The MTP block: hidden states of the trunk in, one per depth out.

The block depends neither on the trunk's class nor on the loss. Letters in names: D depths, S sequence, B batch, H
hidden.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.megatron.checkpoint import ABSENT
from megatron_mtp.model.chain import DepthInputs, TrunksHead, chain, padding_mask
from megatron_mtp.model.mixing import mixer_of
from megatron_mtp.model.mtp import MultiTokenPredictionLayer, MultiTokenPredictionLayerSubmodules
from megatron_mtp.model.shared_keys import FirstPassKeys, SharingAttention, sharing
from megatron_mtp.model.trunk_output import Angles, TrunkOutput, Turns, is_detached


class MultiTokenPredictionBlock(TrunksHead, MegatronModule):
    """D MTP layers in sequence; with `mtp_use_repeated_layer`, one layer serves all depths.

    Attributes:
        draft_vocabulary: [N], int64, ascending: the token of every draft index, stored with the layers in checkpoints;
            None if all tokens can be drafted.
        shares_kv: whether later passes of a repeated layer attend to pass 1's keys and values.
        has_chain: whether they also attend to those of their own chain.
        drafter: settings of a drafter (`drafter.py`); None for MTP layers.
        absent: key prefixes of the parts of this block that the checkpoint to load lacks.
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
        with get_fp8_context(config, is_init=True):  # with --fp8-param-gather, create FP8 weights as in the trunk
            self.layers = torch.nn.ModuleList(
                self.make_layer(submodules, number, pg_collection, vp_stage) for number in range(1, physical + 1)
            )
        self._sharing = [one for one in self.modules() if isinstance(one, SharingAttention | FirstPassKeys)]
        if config.mtp_detach_heads:
            for parameter in self.parameters():
                parameter.grad_norm_group = "mtp"  # Megatron's optimizer clips these gradients separately

    def make_layer(self, *args: Any) -> MegatronModule:
        """Create a layer from the arguments that its class takes after the configuration."""
        return MultiTokenPredictionLayer(self.config, *args)

    def drafts(self, trunk: TrunkOutput, batch: DepthBatch) -> tuple[list[Tensor], Tensor | None]:
        """Return the inputs of the output layer for each depth, and the confidence logits, if there are any."""
        inputs = DepthInputs(
            batch.tokens_DBS,
            [trunk.position_ids_BS] * self.depths,
            trunk.embedding,
            trunk.attention,
            padding_mask(batch, self.config, self.tp_group),
            mixer_of(batch, self.config, self.groups),
            self.later_angles(trunk),
            trunk.is_apart,
        )
        return self(trunk.hidden_SBH, inputs), None

    def later_angles(self, trunk: TrunkOutput) -> Angles | None:
        """Return the rotary angles of passes that share keys; None if all passes use the same positions."""
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

    @property
    def mtp_use_repeated_layer(self) -> bool:
        """Return whether one layer serves all depths. Megatron's inference engine reads this."""
        return bool(self.config.mtp_use_repeated_layer)

    def forward(self, hidden_SBH: Tensor, inputs: DepthInputs) -> list[Tensor]:
        """Compute the hidden states of depths 1 .. D, each [S, B, H].

        Args:
            hidden_SBH: the trunk's hidden states, after its final norm.
            inputs: further inputs of the MTP layers; with `--mtp-detach-heads`, all of them are detached.

        Raises:
            ValueError: passes were trained to share keys, which the layer's attention does not support.
        """
        if self.shares_kv and not self._sharing:
            shares, whose = ("shares", "Transformer Engine's") if self.has_chain else ("first-pass", "this kind of")
            raise ValueError(
                f"the MTP layers were trained with --mtp-repeated-layer-{shares}-kv, which {whose} attention cannot "
                "do; build the model with --transformer-impl local."
            )
        if is_detached(self.config):
            inputs = replace(inputs, is_apart=True)
        if not self.sequential:
            hidden_SBH = hidden_SBH.detach() if inputs.is_apart else hidden_SBH
            return [layer(hidden_SBH, None, inputs.attention, inputs.mask(k)) for k, layer in enumerate(self.layers)]
        with sharing(self._sharing) if self._sharing else nullcontext():
            return chain([*self.layers], hidden_SBH, inputs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return entries of every layer under `layers.{depth - 1}`, and the draft vocabulary.

        Nothing is split over stages.

        Parts that the checkpoint to load lacks get a key that marks them.
        """
        entries = self.entries(prefix, sharded_offsets, metadata)
        if self.absent:
            for name, entry in entries.items():
                if name.removeprefix(prefix).startswith(self.absent):
                    entry.key = ABSENT + entry.key
        return entries

    def entries(
        self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any] | None
    ) -> ShardedStateDict:
        """Return the same entries, as if the checkpoint lacked nothing."""
        own = {} if self.draft_vocabulary is None else {"draft_vocabulary": self.draft_vocabulary}
        entries: ShardedStateDict = make_sharded_tensors_for_checkpoint(own, prefix, sharded_offsets=sharded_offsets)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, MegatronModule)
            entries.update(layer.sharded_state_dict(f"{prefix}layers.{index}.", sharded_offsets, metadata))
        return entries
