"""Tiny models of this package and of Megatron with the same weights, and batches for them, in one process.

Call `megatron_mtp.megatron.runtime.prepare()` before creating a model (conftest.py does).
"""

import os
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import DepthBatch, depth_batch
from megatron_mtp.losses.head_objective import HeadObjective
from megatron_mtp.losses.objective import NextTokensObjective, ObjectiveOutput
from megatron_mtp.losses.token_loss import CrossEntropy, TokenLoss
from megatron_mtp.model.arguments import MTPGPTModelConfig
from megatron_mtp.model.build import build, join_world
from megatron_mtp.spec.config import MTPConfig

VOCABULARY, LENGTH, ROWS = 96, 16, 3
LAMBDA = 0.3

MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}


def join_world_of_one() -> None:
    """Create the process group of this process, even if an earlier test left the environment of a job."""
    with mock.patch.dict(os.environ):
        os.environ.pop("RANK", None)
        join_world()


def transformer_config(depths: int | None, **changes: Any) -> TransformerConfig:
    """Return a Llama-like transformer of two layers; `changes` are fields of TransformerConfig."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        "mtp_num_layers": depths,
        "mtp_loss_scaling_factor": LAMBDA,
    }
    kind = MLATransformerConfig if "multi_latent_attention" in changes else TransformerConfig
    return kind(**{**fields, **changes})


def our_model(
    depths: int | None,
    tied: bool = False,
    architecture: str = "sequential",
    position: str = "rope",
    drafted: list[int] | None = None,
    tokens: int | None = None,
    shares_kv: bool = False,
    first_pass_kv: bool = False,
    drafter_layers: tuple[int, ...] | None = None,
    drafter: dict[str, Any] | None = None,
    beside: dict[str, Any] | None = None,
    freezes: bool = False,
    loads_trunk: bool = False,
    **changes: Any,
) -> GPTModel:
    settings: dict[str, Any] = {"mtp_architecture": architecture, "mtp_repeated_layer_shares_kv": shares_kv}
    settings["mtp_repeated_layer_first_pass_kv"] = first_pass_kv
    if drafter_layers is not None:
        settings |= {"drafter": "eagle3", "drafter_layers": drafter_layers, "mtp_train_only": True, **(drafter or {})}
        changes |= {"mtp_use_repeated_layer": True}
    if freezes:
        settings["mtp_train_only"] = True
    config = MTPGPTModelConfig(
        transformer=transformer_config(depths, **changes),
        mtp=MTPConfig(**settings, **(beside or {})),
        drafter_steps=(beside or {}).get("drafter_steps", 0),
        draft_vocabulary=None if drafted is None else torch.tensor(drafted),
        true_vocab_size=tokens,
        loads_trunk=loads_trunk,
        **_gpt_fields(tied, position),
    )
    model = build(config)
    randomize(model)
    return model.cuda()


def megatron_model(depths: int | None, tied: bool = False, position: str = "rope", **changes: Any) -> GPTModel:
    config = GPTModelConfig(transformer=transformer_config(depths, **changes), **_gpt_fields(tied, position))
    return GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).cuda()


def _gpt_fields(tied: bool, position: str) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "seq_length": LENGTH,
        "position_embedding_type": position,
        "share_embeddings_and_output_weights": tied,
    }


def randomize(model: torch.nn.Module, seed: int = 1) -> None:
    """Set weights large enough that every part of the model affects the loss; norms are near 1, but not 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)


def megatron_name(name: str) -> str:
    """Return the name of our parameter in Megatron's own MTP."""
    return name.replace(".tf_layer.", ".mtp_model_layer.")


def copy_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Copy every parameter by name; both sides must have the same names."""
    source = {megatron_name(name): parameter for name, parameter in ours.named_parameters()}
    target = dict(theirs.named_parameters())
    assert source.keys() == target.keys()
    with torch.no_grad():
        for name, parameter in target.items():
            parameter.copy_(source[name])


def make_batch(
    depths: int, loss_mask_BS: Tensor | None = None, seed: int = 2, tokens: int = VOCABULARY
) -> dict[str, Any]:
    """Return whole sequences and their depths; the default mask has holes (a fifth of the slots, first and last ones
    too).
    """
    generator = torch.Generator().manual_seed(seed)
    stream_BS = torch.randint(1, tokens, (ROWS, LENGTH + 1), generator=generator).cuda()
    if loss_mask_BS is None:
        loss_mask_BS = (torch.rand(ROWS, LENGTH, generator=generator) > 0.2).float()
        loss_mask_BS[0, 0] = loss_mask_BS[1, -1] = 0
    batch: dict[str, Any] = {
        "tokens": stream_BS[:, :-1].contiguous(),
        "labels": stream_BS[:, 1:].contiguous(),
        "loss_mask": loss_mask_BS.cuda(),
        "position_ids": torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous().cuda(),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not().cuda(),
    }
    batch["depths"] = depth_batch(batch, depths)
    return batch


def objective(model: LanguageModule, factor: float = LAMBDA, **settings: Any) -> NextTokensObjective:
    """Return an objective with the same weight for every depth, on one context-parallel rank."""
    depths = model.config.mtp_num_layers or 0
    group = parallel_state.get_context_parallel_group()
    return one_head([factor / depths] * depths, group, **settings) if depths else NextTokensObjective()


def one_head(
    weights: list[float],
    group: ProcessGroup,
    depth_loss: TokenLoss | None = None,
    linear_main: bool = False,
    trains_trunk: bool = True,
    **of_head: Any,
) -> NextTokensObjective:
    """Return the objective of a model with one head; cross-entropy by default."""
    loss = depth_loss or CrossEntropy()
    head = HeadObjective(weights, group, loss, beside_main=trains_trunk, **of_head)
    return NextTokensObjective([head], linear_main, trains_trunk)


def forward_ours(
    model: LanguageModule,
    batch: dict[str, Any],
    depths: DepthBatch | None = None,
    factor: float = LAMBDA,
    **settings: Any,
) -> ObjectiveOutput:
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        output_processor=objective(model, factor, **settings),
        output_processor_context=[batch["depths"] if depths is None else depths],
    )
    assert isinstance(output, ObjectiveOutput)
    return output


def loss_of(output: ObjectiveOutput) -> Tensor:
    """Return the microbatch's loss as Megatron's schedule computes it from the objective's."""
    return output.loss / output.main.tokens.clamp(min=1)


def mean_losses(output: ObjectiveOutput) -> Tensor:
    """Return mean losses [1 + D], the trunk's first."""
    sums = [output.main, *(depth for head in output.heads for depth in head.depths)]
    return torch.stack([each.total / each.tokens.clamp(min=1) for each in sums]).detach()


def backward_ours(
    model: LanguageModule, whole: dict[str, Any], batch: DepthBatch | None = None, factor: float = LAMBDA
) -> Tensor:
    """Run the backward pass of one microbatch; return the mean losses, the trunk's first."""
    destroy_moe_metrics_tracker()  # it has a slot for every layer of the previous model
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0).cuda())
    output = forward_ours(model, whole, batch, factor)
    loss_of(output).backward()
    return mean_losses(output)


def backward_megatron(model: torch.nn.Module, batch: dict[str, Any], per_token: bool = False) -> Tensor:
    """Do the same the way Megatron trains its own MTP."""
    for scaler in (MTPLossAutoScaler, MoEAuxLossAutoScaler):
        scaler.set_loss_scale(torch.tensor(1.0).cuda())
    MTPLossLoggingHelper.tracker.clear()
    losses_BS = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    total, tokens = (losses_BS * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
    (total if per_token else total / tokens).backward()
    return torch.stack([(total / tokens).detach(), *MTPLossLoggingHelper.tracker["loss_values"]])


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grads[name] = parameter.grad
    return grads


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return max |a - b| / max |b|; 0 if both are all zeros."""
    largest = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    return difference if largest == 0 else difference / largest
