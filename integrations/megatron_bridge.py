"""For Megatron-Bridge's `finetune` with new MTP layers: the `peft` of its configuration."""

from typing import Any

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
