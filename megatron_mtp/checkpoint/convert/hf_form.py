"""The form of an exported folder: config, files and tensor names.

It is the form of another folder, such as the imported one, or is derived from Megatron's arguments. A trained model
takes the first form that fits it (`Family.trained`). With MTP layers that is GLM-4 MoE or DeepSeek-V3, which
transformers, vLLM and SGLang load with MTP; a dense model fits into them too (`split_mlp_rules`).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.convert.computation import check_config
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.convert.stored import stored_layout, zero_features
from megatron_mtp.checkpoint.convert.tokens import Tokens
from megatron_mtp.checkpoint.families import FAMILIES, family_of, trained_forms
from megatron_mtp.checkpoint.families.inside import InnerDrafter
from megatron_mtp.checkpoint.families.trained import common_keys
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig, are_words, read_json, text_key
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.quantized import without_quantization
from megatron_mtp.megatron.checkpoint import HF_FILES, ORIGIN
from megatron_mtp.megatron.checkpoint.iterations import has_tokenizer, run_tokenizer
from megatron_mtp.megatron.checkpoint.reader import DistReader, StoredDepths


@dataclass(frozen=True)
class HFForm:
    """The form of an exported folder.

    Attributes:
        keys: keys of its `config.json`.
        features: names of the forms that it uses, out of the family's.
        carried: names of the tensors without a rule.
        files: folder of the tokenizer and other files to copy; None for none.
        texts: further files, by name.
        folder: Hugging Face folder of this form, for carried tensors that the checkpoint lacks; None if there is none.
    """

    keys: dict[str, Any]
    features: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    files: Path | None = None
    texts: dict[str, str] = field(default_factory=dict)
    folder: HFFolder | None = None


def kept_form(folder: Path) -> HFForm | None:
    """Return the form that an import stored with its checkpoint; None if there is none.

    Raise ValueError if it is damaged.
    """
    kept = folder / HF_FILES
    if not (kept / CONFIG).is_file():
        return None
    keys, layout = read_json(kept / CONFIG), kept_origin(kept).get("layout", {})
    HFConfig.from_keys(keys, str(kept / CONFIG))
    # The checkpoint's tensors are not quantized: either they were decoded, or only the config declared FP8.
    return HFForm(without_quantization(keys), tuple(layout.get("features", ())), tuple(layout.get("carried", ())), kept)


def kept_origin(kept: Path) -> dict[str, Any]:
    """Return the record of an import (`import_hf.origin`) from the stored files; empty if there is none."""
    if not (kept / ORIGIN).is_file():
        return {}
    origin = read_json(kept / ORIGIN)
    layout = origin.get("layout", {}) if isinstance(origin, dict) else None
    lists = [layout.get(name, []) for name in ("features", "carried")] if isinstance(layout, dict) else [None]
    if not isinstance(origin, dict) or not all(map(are_words, lists)):
        raise ValueError(
            f"{kept / ORIGIN} is not a record of a conversion; fetch the checkpoint again, or convert anew."
        )
    return origin


def form_of(
    source: Path | DistReader,
    like: Path | None = None,
    family: str | None = None,
    tokenizer: Path | None = None,
    trust_remote_code: bool = False,
) -> HFForm:
    """Return the form of the folder that a checkpoint is exported to.

    Args:
        source, trust_remote_code: the checkpoint or its reader; whether to run code that comes with its tokenizer.
        like: Hugging Face folder or converted checkpoint from which to take config and files; a folder also provides
            carried tensors that the checkpoint lacks.
        family: `model_type` to export to; None for the imported one, or the one that fits.
        tokenizer: tokenizer folder to copy.

    Raises:
        ValueError: the flags contradict each other, the folder has no tokenizer, or no family supports the model.
    """
    if like is not None and family is not None:
        raise ValueError("--like and --family were given, but --like already sets the family; drop one of the two.")
    if tokenizer is not None and not has_tokenizer(tokenizer):
        raise ValueError(f"--tokenizer is {tokenizer}, where there is no tokenizer; give a folder with tokenizer.json.")
    reader = source if isinstance(source, DistReader) else DistReader(source)
    kept = kept_form(reader.home)
    depths = StoredDepths.of(reader.keys).layers
    config = HFConfig.from_keys(kept.keys) if kept is not None else None
    if like is not None:
        form, remedy = kept_form(like) or hf_folder_form(like), "give a folder of the same model (--like)."
        where = f"the {CONFIG} of {like}"
    elif config is not None and kept is not None and family is None and (not depths or family_of(config).depths):
        named = config.model_type if config.model_type in trained_forms() else "NAME"
        form, where, remedy = kept, f"{kept.files}/{CONFIG}", f"make the config anew (--family {named})."
    else:
        form = trained_form(reader, family, tokenizer or (kept.files if kept else None), trust_remote_code)
        where, remedy = "the config for it", "it cannot be exported to this family."
    layout = stored_layout(reader, form.features, form.carried)
    keys = with_depths(form.keys, layout.depths, pattern_of(reader))
    check_config(keys, layout, reader.common()["args"], where, remedy)
    return replace(form, files=tokenizer or form.files)


def hf_folder_form(folder: Path) -> HFForm:
    """Return the form of a Hugging Face folder, from its config and tensor names."""
    model = HFModel.read(folder)
    keys = without_quantization(read_json(folder / CONFIG))
    return HFForm(keys, tuple(model.layout.features), model.layout.carried, folder, folder=model.folder)


def trained_form(
    reader: DistReader, family: str | None = None, tokenizer: Path | None = None, trust_remote_code: bool = False
) -> HFForm:
    """Return the form of a trained checkpoint, from Megatron's arguments. Raise ValueError if no family fits."""
    args = reader.common()["args"]
    if (pattern := pattern_of(reader)) is not None:
        raise ValueError(
            f"the checkpoint is a hybrid model of layers {pattern}, which no form of a trained model here has; apply "
            "hybrid-to-gpt if these are a GPT's layers, else give a folder of such a model (--like)."
        )
    depths = StoredDepths.of(reader.keys).layers
    forms = trained_forms()
    fitting = (name for name, form in forms.items() if form.fits(args, depths))
    chosen = next(fitting) if family is None else family
    if chosen not in forms:
        raise ValueError(f"--family is '{chosen}'; a trained model becomes one of {', '.join(forms)}.")
    form, stored = forms[chosen], FAMILIES[chosen].depths
    tokens = Tokens.of(tokenizer or run_tokenizer(args, reader.home), args, trust_remote_code)
    dtype = str(reader.dtype("decoder.final_layernorm.weight")).removeprefix("torch.")
    keys = {**common_keys(args, tokens.vocabulary(reader), dtype), **form.keys(args), **tokens.ids}
    keys |= {"architectures": [form.architecture], "model_type": chosen}
    keys |= {stored.keys[0]: depths} if stored is not None and depths else {}
    texts = {**form.files, **tokens.generation_config()}
    return HFForm(keys, zero_features(reader), files=tokens.folder, texts=texts)


def pattern_of(reader: DistReader) -> str | None:
    """Return the pattern of a hybrid checkpoint; None for a GPT."""
    return getattr(reader.common()["args"], "hybrid_layer_pattern", None)


def with_depths(keys: dict[str, Any], depths: int, pattern: str | None = None) -> dict[str, Any]:
    """Return the config's keys for this number of MTP layers; unchanged if they already imply it.

    A hybrid's `pattern` determines the keys that name the layers of an MTP layer.
    """
    config = HFConfig.from_keys(keys)
    stored = family_of(config).depths
    if stored is None or InnerDrafter.of(config.keys, ()) is not None:
        return keys
    counts_alone = stored.published or None if stored.default is None else stored.default
    configured = stored.configured(config)
    if (counts_alone if configured is None else configured) in (None, depths):
        return keys
    counts: dict[str, Any] = {key: depths for key in stored.keys if config.has(key)} or {stored.keys[0]: depths}
    if depths and stored.layers_key is not None and pattern is not None:
        counts[stored.layers_key] = pattern.rpartition("/")[2]
    whole = {**keys, **{key: count for key, count in counts.items() if key in keys}}
    if (text := text_key(keys)) is None:
        return whole | counts
    return {**whole, text: {**keys[text], **counts}}
