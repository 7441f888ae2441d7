"""For Megatron-Bridge: new MTP layers beside LoRA in its `finetune`, and drafters, which it has no names for."""

from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.peft.lora import LoRA

from megatron_mtp.attach import attach
from megatron_mtp.spec.config import MTPConfig


class LoRAWithHead(LoRA):
    """LoRA of the trunk, and a new MTP layer that is trained whole and saved with the adapters."""

    def __call__(self, model: Any, training: bool = True) -> Any:
        """The model with adapters and the layer."""
        model = super().__call__(model, training=training)
        attach(model, 1, MTPConfig(mtp_train_only=True), weight=0.1)
        return model


def skip_unnamed_parameters() -> None:
    """Let Bridge pass over parameters that it has no names for, such as a drafter's, where it loads and exports."""
    build = MegatronModelBridge.build_conversion_tasks

    def build_named(*given: Any, **named: Any) -> list[Any]:
        return [task for task in build(*given, **named) if task is not None]

    MegatronModelBridge.build_conversion_tasks = build_named
