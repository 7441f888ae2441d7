"""MTP layers for a model of Megatron's own class: builds a new MTP block and runs the layers of a block.

The last stage gets a block of Megatron's class, with names that exporters know.
"""

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import _fork_rng
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch, shift_left
from megatron_mtp.model.around_layers import checkpointed, set_quantization
from megatron_mtp.model.chain import DepthInputs, Layer, TrunksHead, chain, padding_mask
from megatron_mtp.model.mixing import mixer_of
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.stock import LEARNED, OWN, as_trunk, initializing, share_embedding
from megatron_mtp.model.swapped import with_modules
from megatron_mtp.model.trunk_output import AttentionInputs, TrunkOutput

if TYPE_CHECKING:
    from megatron_mtp.spec.head import HeadSpec


def add_block(chunk: Any, depths: int, block: str) -> None:
    """Add a new MTP block to the last chunk, and share the embedding (`share_embedding`). Call it for every chunk.

    Raises:
        ValueError: Megatron cannot build such a block; the chunk is unchanged.
    """
    config = chunk.config
    if chunk.post_process:
        with _fork_rng(), initializing(config), ExitStack() as undo:
            undo.callback(setattr, config, "mtp_num_layers", None)  # so that `attach` can be called again
            config.mtp_num_layers = depths
            chunk.mtp = _new_block(chunk, depths, block)
            undo.pop_all()
        as_trunk(chunk.mtp, chunk)
        set_quantization(chunk.mtp, config)
    share_embedding(chunk, depths)


def _new_block(chunk: Any, depths: int, block: str) -> MultiTokenPredictionBlock:
    """Build Megatron's MTP block with layers like those at the end of the trunk, or with the pattern `block`."""
    config, stage = chunk.config, {"vp_stage": chunk.vp_stage, "pg_collection": chunk.pg_collection}

    def portable(spec: Any) -> Any:
        norm = getattr(chunk.decoder, "final_layernorm", None) or getattr(chunk.decoder, "final_norm", None)
        # the layers are shaped like the trunk's; Megatron chooses the norms around them
        return with_modules(spec, {WrappedTorchNorm: PortableNorm}) if isinstance(norm, PortableNorm) else spec

    if not hasattr(chunk, "hybrid_stack_spec"):
        layers = chunk.transformer_layer_spec
        uses_te = config.transformer_impl == "transformer_engine"
        spec = get_gpt_mtp_block_spec(config, layers, uses_te, vp_stage=chunk.vp_stage)
        return MultiTokenPredictionBlock(config, portable(spec), **stage)
    layers = chunk.hybrid_stack_spec.submodules
    spec = layers.mtp_block_spec
    if spec is None:
        layer = get_mtp_layer_spec_for_backend(None, LocalSpecProvider())
        spec = portable(MultiTokenPredictionBlockSubmodules([layer]))
    pattern = _end_of(chunk.hybrid_layer_pattern) if block == OWN else block
    hybrid = {"mtp_layer_pattern": pattern, "mtp_num_depths": depths, "hybrid_submodules": layers}
    return MultiTokenPredictionBlock(config, spec, **stage, **hybrid)


def _end_of(pattern: str) -> str:
    """Return the trunk's last layer that mixes positions and the MLPs and experts after it: `*E` for `M-*-ME*E`."""
    found = re.search(r"[^-E]?[-E]*$", pattern.partition("/")[0].replace("|", ""))
    assert found is not None
    return found[0]


class StockHead(TrunksHead):
    """MTP layers of Megatron's class as a draft head (`DraftHead` in attachment.py).

    Args:
        passes: passes of one repeated layer in training; None for the model's number of draft tokens.
    """

    drafter: "HeadSpec | None" = None

    def __init__(self, model: Any, passes: int | None = None) -> None:
        self.config, self.groups, self.depths = model.config, model.pg_collection, passes or model.config.mtp_num_layers
        self._block = model.mtp
        self._learns_positions = model.position_embedding_type == LEARNED

    def drafts(self, trunk: TrunkOutput, batch: DepthBatch) -> tuple[list[Tensor], None]:
        """Compute the inputs of the output layer, one per depth; there is no confidence."""
        positions = [trunk.position_ids_BS] * self.depths
        if self._learns_positions:  # embed each token at its own position, as in the trunk
            positions = [*torch.where(batch.inside_DBS, shift_left(trunk.position_ids_BS, self.depths), 0)]
        inputs = DepthInputs(
            batch.tokens_DBS,
            positions,
            trunk.embedding,
            trunk.attention,
            padding_mask(batch, self.config, self.groups.tp),
            mixer_of(batch, self.config, self.groups),
            is_apart=trunk.is_apart or self.is_apart,
        )
        layers = [runner(layer) for layer in self._block.layers]  # not shared: a deep copy must run its own layers
        return chain(layers, trunk.hidden_SBH, inputs), None


def runner(layer: Any) -> Layer:
    """Return a function that runs Megatron's layer without its own token shifts, which cross document ends."""

    def run(hidden_SBH: Tensor, embedded_SBH: Tensor, attention: AttentionInputs, mask_BS: Tensor | None) -> Tensor:
        def once(hidden_SBH: Tensor, embedded_SBH: Tensor | None, mask_BS: Tensor | None) -> Tensor:
            masks = {} if mask_BS is None else {"padding_mask": mask_BS}
            made_SBH: Tensor = layer._proj_and_transformer_layer(
                hidden_states=hidden_SBH, decoder_input=embedded_SBH, **masks, **vars(attention)
            )
            return made_SBH

        if layer.training and layer.config.recompute_granularity == "full":
            return checkpointed(once, layer.config, layer.tp_group, hidden_SBH, embedded_SBH, mask_BS)
        return once(hidden_SBH, embedded_SBH, mask_BS)

    return run
