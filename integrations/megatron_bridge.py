"""For Megatron-Bridge: new MTP layers next to LoRA in its `finetune`, and drafters, which Bridge cannot name."""

from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.peft.lora import LoRA

from megatron_mtp.attach import attach
from megatron_mtp.spec.config import MTPConfig


class LoRAWithHead(LoRA):
    """LoRA on the trunk, and a new MTP layer that is fully trained and saved with the adapters."""

    def __call__(self, model: Any, training: bool = True) -> Any:
        """Return the model with adapters and the layer."""
        model = super().__call__(model, training=training)
        attach(model, 1, MTPConfig(mtp_train_only=True), weight=0.1)
        return model


def skip_unnamed_parameters() -> None:
    """Let Bridge skip parameters that it has no names for, such as a drafter's, when loading and exporting."""
    build = MegatronModelBridge.build_conversion_tasks

    def build_named(*given: Any, **named: Any) -> list[Any]:
        return [task for task in build(*given, **named) if task is not None]

    MegatronModelBridge.build_conversion_tasks = build_named
