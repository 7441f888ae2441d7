"""Schedule plan of a forward pass for `--overlap-moe-expert-parallel-comm`, which bypasses forward hooks.

    plan = HeadsSchedulePlan(model, tokens, positions, mask, output_processor=objective, ...)

The trunk's layers are nodes of the plan, whose communication overlaps; MTP layers and drafters run whole in its last
node.
"""

from typing import Any, override

from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.common.utils import PostProcessNode
from megatron.core.transformer.module import float16_to_fp32
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.mtp_block import MultiTokenPredictionBlock
from megatron_mtp.model.trained_stage import TrainedStage
from megatron_mtp.model.trunk_output import AttentionInputs


class HeadsNode(PostProcessNode):
    """The last node: MTP layers, drafters and the objective."""

    @override
    def forward_impl(self, hidden_SBH: Tensor) -> Any:
        """Return the objective's result in float32, as the schedule expects."""
        model, state = self.model, self.chunk_state
        if not (model.config.mtp_num_layers or model.decoder.layers) and model.decoder.final_layernorm is not None:
            normed_SBH = model.decoder.final_layernorm(hidden_SBH)
            hidden_SBH = make_viewless_tensor(normed_SBH, requires_grad=True, keep_graph=True)
        stage = attached_of(model)
        assert isinstance(stage, TrainedStage)
        attention = AttentionInputs(**{name: getattr(state, name) for name in AttentionInputs.__annotations__})
        given = state.output_processor, state.output_processor_context, state.position_ids
        return float16_to_fp32(stage.finish(hidden_SBH, *given, attention, state.runtime_gather_output))


class HeadsSchedulePlan(TransformerModelChunkSchedulePlan):
    """Megatron's schedule plan, in which draft heads are not layers."""

    POST_PROCESS_NODE_CLASS = HeadsNode

    @override
    def _build_layer_schedule_plan(self, module: nn.Module | None, *streams: Any) -> None:
        if not isinstance(module, MultiTokenPredictionBlock):
            super()._build_layer_schedule_plan(module, *streams)
