"""Adds MTP training to Megatron-LM's own `pretrain_gpt.py` (since 0.19) with two changed lines.

    from megatron_mtp.training.megatron_lm import gpt_config_from_args, parse_and_validate_args, pretrain

Put this line below the script's own imports, whose functions it replaces, and remove `forward_step` from its call of
`pretrain()`. docs/guides/from_megatron_lm.md shows both changes. The first call of any of these functions makes
Megatron runnable on this machine (`megatron_mtp.megatron.runtime`).
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args
from megatron.training.config import PretrainConfigContainer

from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model.arguments import MTPGPTModelConfig, MTPHybridModelConfig, MTPModelConfig
from megatron_mtp.model.build import build
from megatron_mtp.training.arguments import ArgumentsProvider, checked_model_config, parse_run_args
from megatron_mtp.training.datasets import datasets_provider
from megatron_mtp.training.run import fit_to_machine, get_embedding_ranks, train
from megatron_mtp.training.startup import explained

__all__ = [
    "datasets_provider",
    "get_embedding_ranks",
    "gpt_config_from_args",
    "hybrid_config_from_args",
    "model_provider",
    "parse_and_validate_args",
    "pretrain",
]


def parse_and_validate_args(
    extra_args_provider: ArgumentsProvider | None = None, args_defaults: dict[str, Any] | None = None
) -> Namespace:
    """Replacement of Megatron's function, with the --mtp-* flags and their checks.

    A flag with a value that is not allowed ends the program with one sentence and exit status 2.
    """
    fit_to_machine(sys.argv, prepare())
    with explained(Path(sys.argv[0]).name):
        return parse_run_args(extra_args_provider, args_defaults)


def gpt_config_from_args(
    args: Namespace,
    config: TransformerConfig | None = None,
    model_config_cls: type[MTPGPTModelConfig] = MTPGPTModelConfig,
) -> MTPGPTModelConfig:
    """Replacement of Megatron's function. The builder of the returned configuration adds our MTP block to the trunk.

    Ends the program with one sentence if a checkpoint lacks MTP layers, unless --mtp-init specifies how to initialize
    them.
    """
    made: MTPGPTModelConfig = _config_from_args(args, config, model_config_cls, MTPGPTModelConfig)
    return made


def hybrid_config_from_args(
    args: Namespace,
    config: TransformerConfig | None = None,
    model_config_cls: type[MTPHybridModelConfig] = MTPHybridModelConfig,
) -> MTPHybridModelConfig:
    """Return the configuration for Megatron's hybrid script, whose flags include --hybrid-layer-pattern."""
    made: MTPHybridModelConfig = _config_from_args(args, config, model_config_cls, MTPHybridModelConfig)
    return made


def _config_from_args(args: Namespace, config: TransformerConfig | None, kind: type, wanted: type) -> Any:
    prepare()
    if not issubclass(kind, wanted):
        raise TypeError(f"model_config_cls is {kind.__name__}; give a subclass of {wanted.__name__}.")
    is_hybrid = args.hybrid_layer_pattern is not None
    with explained(Path(sys.argv[0]).name):
        if is_hybrid != issubclass(wanted, MTPHybridModelConfig):
            name = "hybrid_config_from_args" if is_hybrid else "gpt_config_from_args"
            raise ValueError(
                f"--hybrid-layer-pattern is {args.hybrid_layer_pattern}, and the script makes the configuration of "
                f"another class of model; call {name} there."
            )
        return checked_model_config(args, config=config, model_config_cls=kind)


def _own_config(args: Namespace, config: TransformerConfig | None = None) -> MTPModelConfig:
    if args.hybrid_layer_pattern is None:
        return gpt_config_from_args(args, config)
    return hybrid_config_from_args(args, config)


def pretrain(
    cfg_container: PretrainConfigContainer,
    train_valid_test_dataset_provider: Any,
    model_type: ModelType = ModelType.encoder_or_decoder,
    forward_step_func: None = None,
    model_provider: None = None,
    **pretrain_arguments: Any,
) -> None:
    """Replacement of Megatron's function, with its own forward step and model provider.

    Args:
        cfg_container: result of Megatron's `pretrain_cfg_container_from_args`.
        train_valid_test_dataset_provider: the script's own; samples need the keys of GPTDataset.
        model_type: the only model type.
        forward_step_func, model_provider: must be None; they exist only for a clear error in calls that still pass
            them.
        pretrain_arguments: other arguments of Megatron's `pretrain()`, such as `store`.

    Raises:
        TypeError: a forward step or model provider was passed, or the configuration is from Megatron's
            `gpt_config_from_args`.
    """
    if forward_step_func is not None or model_provider is not None:
        raise TypeError(
            "pretrain() of megatron_mtp.training.megatron_lm was given a forward step or a model provider, which "
            "would not train the MTP layers; take them out of the call."
        )
    if cfg_container.model is None:
        cfg_container.model = _own_config(get_args())
    if not isinstance(cfg_container.model, MTPGPTModelConfig | MTPHybridModelConfig):
        kind = type(cfg_container.model).__name__
        name = "hybrid_config_from_args" if "Hybrid" in kind else "gpt_config_from_args"
        raise TypeError(
            f"the model's configuration is a {kind}; make it by the {name} of megatron_mtp.training.megatron_lm, "
            "imported after Megatron's."
        )
    with explained(Path(sys.argv[0]).name):
        _check_prompts(get_args(), train_valid_test_dataset_provider)
    train(cfg_container, train_valid_test_dataset_provider, **pretrain_arguments)


def _check_prompts(args: Namespace, provider: Any) -> None:
    """Raise ValueError if prompts must be masked in the script's own datasets, or used to draft."""
    if args.mtp_mask_prompts and provider is not datasets_provider:
        raise ValueError(
            "--mtp-mask-prompts was given, and the script's own data sets do not read it; call pretrain() with the "
            "datasets_provider of megatron_mtp.training.megatron_lm, or drop the flag."
        )
    if args.mtp_draft_prompts is not None:
        raise ValueError(
            "--mtp-draft-prompts was given to a script of your own, which does not draft; drop the flag, or start "
            "megatron-mtp train."
        )


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> torch.nn.Module:
    """Build a pipeline stage of the model that the global arguments describe, for Megatron's `get_model()`."""
    model_config = _own_config(get_args(), config)
    return build(model_config, pg_collection, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
