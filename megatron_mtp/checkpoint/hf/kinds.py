"""Folders that do not convert: quantised releases, adapters, GGUF files, multimodal wrappers, broken links.

Each is refused with a sentence that names its kind and what to do instead.
"""

from collections.abc import Container
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.hf.config import CONFIG, read_json

ADAPTER = "adapter_config.json"
READ_AS_BFLOAT16 = ("fp8", "fbgemm_fp8", "mxfp4")
"""Quantisations that are read: FP8 of DeepSeek and Llama, MXFP4 of gpt-oss; compressed-tensors if all of it is FP8."""
SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files that mark older quantised releases."""


def check_kind(folder: Path, known: Container[str]) -> None:
    """Refuse a folder of a kind that does not convert.

    Args:
        folder: the folder, or what the user gave for one.
        known: every `model_type` that converts.

    Raises:
        ValueError: the folder is of such a kind, or no folder.
    """
    _check_is_folder(folder)
    _check_links(folder)
    if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file():
        base = _object(folder / ADAPTER).get("base_model_name_or_path") or "its base model"
        raise ValueError(
            f"{folder} is an adapter (LoRA) of {base!s:.100}; merge it into that model (merge_and_unload() of peft), "
            "save the result, and give its folder."
        )
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        raise ValueError(_gguf(folder))
    if (folder / CONFIG).is_file():
        keys = _object(folder / CONFIG)
        _check_quantisation(folder, keys)
        _check_wrapper(folder, keys, known)


def _check_is_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    if folder.is_file():
        kind = _gguf(folder) if folder.suffix == ".gguf" else f"{folder} is a file; give the folder that it is in."
        raise ValueError(kind)
    raise ValueError(f"{folder} is no folder; give the folder of a Hugging Face model.")


def _gguf(path: Path) -> str:
    return f"{path} is a GGUF model, as llama.cpp runs it; give the safetensors folder that it was made from."


def _check_links(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} is a link to {path.readlink()}, which is not there; fetch the folder again.")


def _check_quantisation(folder: Path, keys: dict[str, Any]) -> None:
    method = quantisation(folder, keys)
    if method is not None and method not in READ_AS_BFLOAT16:
        raise ValueError(
            f"{folder} is quantised with {method!s:.40}, which is not read here; give the model in bfloat16, FP8 or "
            "MXFP4."
        )


def quantisation(folder: Path, keys: dict[str, Any]) -> str | None:
    """How a folder is quantised: its `quant_method`, or what the files of older releases show; None if it is not.

    Args:
        folder: the folder.
        keys: of its `config.json`.
    """
    text = keys.get("text_config")
    named = next((_method(part) for part in (keys, text) if isinstance(part, dict) and _method(part)), None)
    return named or next((method for file, method in SIDE_FILES.items() if (folder / file).is_file()), None)


def _method(keys: dict[str, Any]) -> str | None:
    """The name of a config's quantisation, None without one; older files of bitsandbytes do not name it."""
    settings = keys.get("quantization_config") or keys.get("compression_config")
    if not settings or not isinstance(settings, dict):
        return None
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    method = str(settings.get("quant_method") or "an unnamed method")
    return "fp8" if method == "compressed-tensors" and _is_fp8(settings) else method


def _is_fp8(settings: dict[str, Any]) -> bool:
    """Whether all weights that compressed-tensors has quantised are FP8."""
    groups = settings.get("config_groups")
    each = groups.values() if isinstance(groups, dict) else []
    weights = [group.get("weights") if isinstance(group, dict) else None for group in each]
    return bool(weights) and all(
        isinstance(one, dict) and one.get("type") == "float" and one.get("num_bits") == 8 for one in weights
    )


def _check_wrapper(folder: Path, keys: dict[str, Any], known: Container[str]) -> None:
    outer, text = keys.get("model_type"), keys.get("text_config")
    if str(outer) in known or not isinstance(text, dict):
        return
    inner = text.get("model_type")
    status = "which converts by itself" if str(inner) in known else "which is unknown here too"
    raise ValueError(
        f"{folder} is a model of type '{outer!s:.40}' around a text model of type '{inner!s:.40}', {status}; save the "
        "text model alone with transformers, and give its folder."
    )


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object."""
    keys = read_json(path)
    if not isinstance(keys, dict):
        raise ValueError(f"{path} holds a {type(keys).__name__}, not an object of keys; fetch it again.")
    return keys
