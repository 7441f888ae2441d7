"""The Hugging Face form of a checkpoint: like another folder, as it was imported, or made from Megatron's arguments.

A trained model takes the first form that fits it (`Family.trained`). With depths that is GLM-4 MoE or DeepSeek-V3,
which transformers, vLLM and SGLang load with MTP; a dense model fits into them too (`split_mlp_rules`).
"""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from megatron_mtp.checkpoint.convert.computation import check_config
from megatron_mtp.checkpoint.convert.exporting import HFForm, kept_form, pattern_of, with_depths
from megatron_mtp.checkpoint.convert.hf_tokens import Tokens
from megatron_mtp.checkpoint.convert.pattern import gpt_arguments
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
    """The form of the folder that a checkpoint is exported to.

    Args:
        source: the checkpoint.
        like: a Hugging Face folder or converted checkpoint from which to take config and files.
        family: `model_type` to export to; None for the imported one, or the one that fits.
        tokenizer: folder of the tokenizer to copy.
        trust_remote_code: whether to run the tokenizer folder's Python code.

    Raises:
        ValueError: the flags contradict each other, the folder has no tokenizer, or no family supports the model.
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
    """Compare the config of a form with the checkpoint's arguments.

    Args:
        form: the form of the export.
        reader: the checkpoint.
        source, remedy: as in `check_config`.

    Raises:
        ValueError: they describe different computations.
    """
    layout = stored_layout(reader, form.features, form.carried)
    keys = with_depths(form.keys, layout.depths, pattern_of(reader))
    check_config(keys, layout, reader.common()["args"], source, remedy)


def _named(form: HFForm) -> str:
    model_type = HFConfig.from_keys(form.keys).model_type
    return model_type if model_type in trained_forms() else "NAME"


def hf_folder_form(folder: Path) -> HFForm:
    """The form of a Hugging Face folder, from its config and the names of its tensors."""
    model = HFModel.read(folder)
    keys = read_json(folder / CONFIG)
    if model.folder.quantised:
        keys.pop("quantization_config", None)
    return HFForm(keys, tuple(model.layout.features), model.layout.carried, folder)


def _check_is_gpt(args: Namespace) -> None:
    """Raises ValueError for a hybrid, with what there is to do about it."""
    if (pattern := getattr(args, "hybrid_layer_pattern", None)) is None:
        return
    remedy = "apply hybrid-to-gpt to it, and export what that makes."
    try:
        gpt_arguments(args, "")
    except ValueError:
        remedy = "give a folder of such a model (--like)."
    raise ValueError(
        f"the checkpoint is a hybrid model of layers {pattern}, which no form of a trained model here has; {remedy}"
    )


def _holds(form: HFForm, depths: int) -> bool:
    """Whether the form's family can hold so many depths: any family holds none."""
    return not depths or family_of(HFConfig.from_keys(form.keys)).depths is not None


def trained_form(
    reader: DistReader, family: str | None = None, tokenizer: Path | None = None, trust_remote_code: bool = False
) -> HFForm:
    """The form of a checkpoint that a training run saved, from Megatron's arguments.

    Args:
        reader: the checkpoint.
        family: `model_type` of the folder; None for the one that fits.
        tokenizer: folder of the tokenizer to copy; None for the training run's.
        trust_remote_code: whether to run the tokenizer folder's Python code.

    Raises:
        ValueError: no family supports the model, or `family` does not.
    """
    args = reader.common()["args"]
    _check_is_gpt(args)
    check_computable(args)
    depths = StoredDepths.of(reader.keys).layers
    forms = trained_forms()
    fitting = (name for name, form in forms.items() if form.fits(args, depths))
    chosen = next(fitting) if family is None else family
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
