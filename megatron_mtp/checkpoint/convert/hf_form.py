"""The Hugging Face form of a model that Megatron has trained: family and config from Megatron's arguments.

Models with depths become GLM-4 MoE or DeepSeek-V3 folders, since these are what transformers, vLLM and SGLang all load
with MTP; a dense model fits into them (`split_mlp_rules`). Without depths they become Llama, Qwen2 or Qwen3 folders.
"""

from dataclasses import replace
from pathlib import Path

from megatron_mtp.checkpoint.convert.computation import check_config
from megatron_mtp.checkpoint.convert.exporting import HFForm, kept_form, with_depths
from megatron_mtp.checkpoint.convert.hf_tokens import Tokens
from megatron_mtp.checkpoint.convert.plan import HFModel, stored_layout, zero_features
from megatron_mtp.checkpoint.families import FAMILIES, family_of, trained_forms
from megatron_mtp.checkpoint.families.trained import check_computable, common_keys
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig, read_json
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES
from megatron_mtp.checkpoint.mcore.stored_depths import StoredDepths
from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.checkpoint.mcore.tokenizer import has_tokenizer, run_tokenizer


def form_of(
    source: Path,
    like: Path | None = None,
    family: str | None = None,
    tokenizer: Path | None = None,
    trust_remote_code: bool = False,
) -> HFForm:
    """The form for a checkpoint: like another folder, as a conversion has kept it, or by Megatron's arguments.

    Args:
        source: the checkpoint.
        like: an HF folder or a converted checkpoint to take config and files from.
        family: `model_type` to export to.
        tokenizer: folder of the tokenizer to copy.
        trust_remote_code: whether to run the code of a tokenizer that has some.

    Raises:
        ValueError: flags contradict each other or name no tokenizer, or no family has what the model has.
    """
    if like is not None and family is not None:
        raise ValueError("--like and --family were given, but a folder to be like has its family; drop one of the two.")
    if tokenizer is not None and not has_tokenizer(tokenizer):
        raise ValueError(
            f"--tokenizer is {tokenizer}, where there is no tokenizer; give a folder with tokenizer.json or its like."
        )
    reader, kept = DistReader(source), kept_form(source)
    if like is not None:
        form, remedy = kept_form(like) or hf_folder_form(like), "give a folder of the same model (--like)."
        check_said(form, reader, f"the {CONFIG} of {like}", remedy)
    elif kept is not None and family is None and _holds(kept, StoredDepths.of(reader.keys).layers):
        form = kept
        check_said(form, reader, f"{source / HF_FILES / CONFIG}", f"make the config anew (--family {_named(kept)}).")
    else:
        form = trained_form(reader, family, tokenizer or (kept.files if kept else None), trust_remote_code)
        check_said(form, reader, "the config for it", "it cannot be exported to this family.")
    return replace(form, files=tokenizer or form.files)


def check_said(form: HFForm, reader: DistReader, source: str, remedy: str) -> None:
    """Whether the folder's config will say what the checkpoint's arguments say; arguments as of `check_config`."""
    layout = stored_layout(reader, form.features, form.carried)
    check_config(with_depths(form.keys, layout.depths), layout, reader.common()["args"], source, remedy)


def _named(form: HFForm) -> str:
    model_type = HFConfig.from_keys(form.keys).model_type
    return model_type if model_type in trained_forms() else "NAME"


def hf_folder_form(folder: Path) -> HFForm:
    """The form of an HF folder, whose tensors say what its config does not."""
    model = HFModel.read(folder)
    keys = read_json(folder / CONFIG)
    if model.folder.quantised:
        keys.pop("quantization_config", None)
    return HFForm(keys, tuple(model.layout.features), model.layout.carried, folder)


def _holds(form: HFForm, depths: int) -> bool:
    """Whether the family has a place for depths, where there are some."""
    return not depths or family_of(HFConfig.from_keys(form.keys)).depths is not None


def trained_form(
    reader: DistReader, family: str | None = None, tokenizer: Path | None = None, trust_remote_code: bool = False
) -> HFForm:
    """The form for a checkpoint that no conversion has made.

    Args:
        family: `model_type` of the folder; None for the one that fits.
        tokenizer: folder to copy into it; None for the one of the training run.
        trust_remote_code: whether to run the tokenizer's own code.

    Raises:
        ValueError: no family here has what the model has, or the one asked for has not.
    """
    args = reader.common()["args"]
    check_computable(args)
    depths = StoredDepths.of(reader.keys).layers
    forms = trained_forms()
    chosen = family or next(name for name, form in forms.items() if form.fits(args, depths))
    if chosen not in forms:
        raise ValueError(f"--family is '{chosen}'; a trained model becomes one of {', '.join(forms)}.")
    form, stored = forms[chosen], FAMILIES[chosen].depths
    tokens = Tokens.of(tokenizer or run_tokenizer(args, reader.folder.parent), args, trust_remote_code)
    dtype = str(reader.dtype("decoder.final_layernorm.weight")).removeprefix("torch.")
    keys = {**common_keys(args, tokens.vocabulary(reader), dtype), **form.keys(args), **tokens.ids}
    keys |= {"architectures": [form.architecture], "model_type": chosen}
    keys |= {stored.keys[0]: depths} if stored is not None and depths else {}
    texts = {**form.files, **tokens.generation_config()}
    return HFForm(keys, zero_features(reader), files=tokens.folder, texts=texts)
