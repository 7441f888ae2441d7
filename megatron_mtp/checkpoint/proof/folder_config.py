"""The keys of a folder's `config.json` that describe the computation, with the defaults of transformers' class."""

from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.convert.computation import Settings
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json


def whole_config(folder: Path) -> Settings:
    """Every key that may change the logits of text, nested keys as `outer.inner`.

    Without a class in transformers for the `model_type`, these are the keys of the file alone.

    Args:
        folder: a folder with a `config.json`.
    """
    from megatron_mtp.checkpoint.proof.reference_forms import config_of

    try:
        keys = config_of(folder)[1].to_dict()
    except Exception:  # transformers raises many kinds of errors for a config that it does not know
        keys = read_json(folder / CONFIG)
    return dict(_flat(keys))


NAMES_ALONE = (
    "architectures auto_map dtype torch_dtype transformers_version _name_or_path quantization_config use_cache "
    "initializer_range attention_dropout bos_token_id eos_token_id pad_token_id id2label label2id output_attentions "
    "output_hidden_states return_dict output_router_logits router_aux_loss_coef vision_config"
).split()
"""Keys that do not change the logits of text."""


def _flat(keys: Settings, prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in keys.items():
        if isinstance(value, dict) and name not in NAMES_ALONE:
            found += _flat(value, f"{prefix}{name}.")
        elif name not in NAMES_ALONE:
            found.append((f"{prefix}{name}", value))
    return found
