"""Whether a checkpoint's arguments and a `config.json` describe the same computation.

Both are converted to Megatron's configuration, and the settings are compared. A model that Megatron cannot run has no
such configuration; `verify` then compares the stored `config.json` with the folder's (verify/reference_forms.py).
"""

import contextlib
import io
from argparse import Namespace
from dataclasses import fields
from typing import Any

from megatron_mtp.checkpoint.families import Layout, family_of
from megatron_mtp.checkpoint.families.family import UntrainableError
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.megatron.patterns import without_stages
from megatron_mtp.model.arguments import DepthFields, config_of
from megatron_mtp.model.stored_arguments import completed

ModelSettings = dict[str, Any]

ASIDE = (
    "seq_length vocab_size make_vocab_size_divisible_by should_pad_vocab attention_dropout hidden_dropout "
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_router_bias_update_rate moe_router_dtype "
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_enable_expert_bias add_qkv_bias "
    "mtp_num_layers mtp_use_repeated_layer"
).split()
"""Settings that are not compared: they concern training, or the tensors determine them."""
LATENT_ASIDE = "kv_channels num_query_groups rotary_percent".split()
"""Settings that latent attention does not use."""
LAYERS_BESIDE = ("spec", "heterogeneous_layers_config_path")
"""Arguments that replace the layers described by the other arguments."""
YARN = (
    "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
    "correction_range_round_to_int"
).split()


def settings_of(args: Namespace) -> ModelSettings:
    """Return the settings of a model's computation in canonical form.

    Raise ValueError if Megatron rejects the arguments.
    """

    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints all arguments
        config = config_of(completed(args))
    names = {field.name for field in fields(config)} - {field.name for field in fields(DepthFields)}
    found = {**vars(config.transformer), **{name: getattr(config, name) for name in sorted(names)}}
    plain = {name: value for name, value in found.items() if isinstance(value, int | float | str | list | tuple | None)}
    plain["activation_func"] = getattr(found["activation_func"], "__name__", None)
    unused = [] if found["num_moe_experts"] else [name for name in found if name.startswith("moe_")]
    if found["multi_latent_attention"]:
        unused += LATENT_ASIDE + ([] if _scales(found) else YARN)
    elif not found.get("rope_scaling"):
        unused.append("rope_scaling_factor")
    plain |= {name: getattr(args, name, None) for name in LAYERS_BESIDE}
    unread = {*ASIDE, *unused}
    return {name: value for name, value in {**plain, **_in_one_form(found)}.items() if name not in unread}


def _in_one_form(found: ModelSettings) -> ModelSettings:
    """Normalize settings that can be written in several ways."""
    frequency, groups = found["moe_layer_freq"], found["moe_router_num_groups"] or 1
    layers, pattern = range(found["num_layers"]), found.get("hybrid_layer_pattern")
    unplaced, divided = found.get("no_rope_freq"), found.get("seq_len_interpolation_factor")
    return {
        "moe_layer_freq": [int(n % frequency == 0) for n in layers] if isinstance(frequency, int) else list(frequency),
        "moe_router_topk_scaling_factor": found["moe_router_topk_scaling_factor"] or 1.0,
        "moe_router_num_groups": groups,
        "seq_len_interpolation_factor": None if divided == 1 else divided,
        "no_rope_freq": unplaced if not isinstance(unplaced, list) or any(unplaced) else None,
        "moe_router_group_topk": found["moe_router_group_topk"] if groups > 1 else None,
        **({"rope_type": "yarn" if _scales(found) else "rope"} if found["multi_latent_attention"] else {}),
        # one MTP layer, if any: the number is seen in the tensors
        **({"hybrid_layer_pattern": "/".join(without_stages(pattern).split("/")[:2])} if pattern else {}),
    }


def _scales(found: ModelSettings) -> bool:
    """Return whether latent attention scales its positions: YaRN has no effect with factor 1."""
    return bool(found["rope_type"] == "yarn" and found["rotary_scaling_factor"] != 1.0)


def check_config(keys: ModelSettings, layout: Layout, args: Namespace, source: str, remedy: str) -> None:
    """Compare a `config.json` with a checkpoint's arguments. A model that Megatron cannot run passes.

    Raises:
        ValueError: they describe different computations; the message names the `source` of the keys, and a `remedy`.
    """
    config = HFConfig.from_keys(keys, source)
    family = family_of(config)
    flags, config = family.flags, family.complete(config)
    if flags is None or getattr(args, "megatron_mtp_untrainable", False):
        return
    try:
        described = parsed(flags(config, layout), config.integer("vocab_size"))
    except UntrainableError as reason:
        raise ValueError(f"{source} asks for {reason}, so the checkpoint computes something else; {remedy}") from None
    if getattr(args, "hybrid_layer_pattern", None) is not None and described.hybrid_layer_pattern is None:
        raise ValueError(f"the checkpoint is a hybrid model, and {source} describes a GPT; apply hybrid-to-gpt to it.")
    different = differences(settings_of(args), settings_of(described))
    if different:
        raise ValueError(f"the checkpoint was trained with {different[0]} in {source}; {remedy}")


def differences(ours: ModelSettings, theirs: ModelSettings, but: str = "but it is") -> list[str]:
    """Return the settings that differ, each as `NAME OURS, but it is THEIRS`."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [f"{name} {ours.get(name)!r:.60}, {but} {theirs.get(name)!r:.60}" for name in names]
