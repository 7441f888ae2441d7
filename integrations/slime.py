"""For slime: --custom-model-provider-path integrations.slime.provider (this folder's parent on PYTHONPATH)."""

from argparse import Namespace
from typing import Any

from megatron.training import get_args
from slime.backends.megatron_utils.model_provider import get_model_provider_func

from megatron_mtp.attach import Head, attach
from megatron_mtp.spec.config import MTPConfig


def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """Build slime's own model, with MTP layers that learn the policy's distribution."""
    args = Namespace(**{**vars(get_args()), "custom_model_provider_path": None})
    model = get_model_provider_func(args)(pre_process, post_process, vp_stage=vp_stage)
    heads = [Head(MTPConfig(mtp_train_only=True, mtp_loss="kd"), depths=1)]
    attach(model, heads=heads, weight=0.1, mask_at="labels")
    return model
