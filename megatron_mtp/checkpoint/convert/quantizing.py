"""Quantized exports: which weights get which form, and the matching `quantization_config`.

    --quantize fp8           trunk         projections of the layers: attention, MLP, experts
    --mtp-dtype bfloat16     MTP layers    the same, chosen separately
    never                    embedding, output layer, eh_proj, routers, norms, recurrent layers, stacked experts

Engines interpret lists of unquantized modules differently: vLLM compares whole names, SGLang and transformers also
parts of names, compressed-tensors whole names or `re:` patterns. So each module is listed with its whole name, and the
experts of a layer with their common name.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mtp.checkpoint.families import CARRIED
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf import Shape, by
from megatron_mtp.checkpoint.hf.forms.form import BLOCK, Form
from megatron_mtp.checkpoint.hf.forms.table import WRITTEN
from megatron_mtp.checkpoint.hf.quantized import COMPRESSED, inside, layer_of, module_of

PLAIN = "bfloat16"
"""The value of `--mtp-dtype` for MTP layers that are not quantized."""
_LINEAR = re.compile(r"^(decoder|mtp)\..*\.linear_\w+\.weight$")
"""Megatron's weights of a layer's projections."""
_CARRIED_LINEAR = re.compile(r"(?!.*(vis(ion|ual)|audio|tower|projector)).*\blayers\.\d+\..*(?<!eh)_proj\.weight$")
"""Weights of projections in layers that Megatron cannot run, by the folder's names."""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")


@dataclass(frozen=True)
class Quantize:
    """The forms of an export.

    Attributes:
        trunk: form of the trunk, a key of `WRITTEN`; None for none.
        depths: form of the MTP layers, or `PLAIN` for bfloat16; None leaves them unchanged.

    Raises:
        ValueError: one config cannot describe both forms.
    """

    trunk: str | None = None
    depths: str | None = None

    def __post_init__(self) -> None:
        forms = {name for name in (self.trunk, self.depths) if name in WRITTEN}
        if len(forms) > 1 and "fp8" in forms:
            raise ValueError(
                f"--quantize is {self.trunk} and --mtp-dtype {self.depths}, but quant_method 'fp8' describes one form; "
                "give --quantize fp8-channel with --mtp-dtype nvfp4 or the other way, or --mtp-dtype bfloat16."
            )

    def form(self, rule: Rule, name: str, shape: Shape, in_depth: bool) -> Form | None:
        """Return the form in which a rule's tensor is written; None if it is not quantized.

        Args:
            rule, name, shape: the tensor in the folder.
            in_depth: whether it belongs to an MTP layer.
        """
        form = WRITTEN.get((self.depths if in_depth else self.trunk) or "")
        if form is None or form.encoding is None or not rule.mcore:
            return None
        carried = rule.mcore[0].key.startswith(CARRIED)
        linear = _CARRIED_LINEAR.match(name) if carried else all(_LINEAR.match(piece.key) for piece in rule.mcore)
        return form if linear and form.encoding.parts(shape) else None


def config(
    coded: Mapping[str, Form], plain: Iterable[str], depths: Iterable[str], in_vllm: Callable[[str], str]
) -> dict[str, Any]:
    """Return the `quantization_config` of a folder.

    Args:
        coded: form of every quantized weight, by name.
        plain: matrices that are not quantized, without the embedding.
        depths: names of the MTP layers' tensors.
        in_vllm: function that returns vLLM's name of a module, which is listed as well.
    """
    forms = list(dict.fromkeys(coded.values()))
    (first, *_) = says = [form.encoding.says for form in forms if form.encoding is not None]
    mixed = {_experts_of(name) for name in coded}
    named = ((module_of(name), _experts_of(name)) for name in plain)
    listed = [module if experts in mixed else experts for module, experts in named]
    modules = list(dict.fromkeys([*listed, *map(in_vllm, listed)]))
    if "quant_method" in first:
        return {**first, "modules_to_not_convert": modules}
    of_depths = set(depths)
    groups = {}
    for number, form in enumerate(forms):
        own = [name for name, one in coded.items() if one == form]
        alone = len(forms) > 1 and of_depths.issuperset(own)
        layers = dict.fromkeys(map(layer_of, [*own, *map(in_vllm, own)]))
        targets = [*map(inside, layers)] if alone else ["Linear"]
        groups[f"group_{number}"] = {"targets": targets, **says[number]}
    return {
        "quant_method": COMPRESSED,
        "format": first["format"] if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [inside(one) if one.endswith(".experts") else one for one in modules],
    }


def loaded_by(coded: Mapping[str, Form], shapes: Mapping[str, Shape]) -> str:
    """Return which engines load an export, and which of its weights transformers reads incorrectly.

    If transformers decodes FP8 during loading, it divides the sizes of a weight by those of its grid of scales: 192
    rows become two blocks of 96, while the form has blocks of 128 and 64 (`Fp8Dequantize` of transformers 5.23).

    Args:
        coded: form of every quantized weight, by name.
        shapes: shapes of the weights.
    """
    engines = [form.engines.split(", ") for form in dict.fromkeys(coded.values())]
    every = [engine for engine in engines[0] if all(engine in others for others in engines)]
    uneven = [
        name
        for name, form in coded.items()
        if form is WRITTEN["fp8"] and any(size > BLOCK and size % BLOCK for size in shapes[name])
    ]
    if not uneven:
        return ", ".join(every)
    others = ", ".join(one for one in every if one != "transformers")
    share = f"{len(uneven)} of {len(coded)} weights"
    first = f"{by(shapes[uneven[0]])} of '{uneven[0]}'"
    return (
        f"{others}; transformers reads {share} wrongly, or refuses them, where it decodes FP8 as it loads (on a CPU): "
        f"{BLOCK} does not divide sizes such as {first}; --quantize fp8-channel is free of that"
    )


def _experts_of(name: str) -> str:
    """Return the common module of a layer's experts for one expert's weight, and a weight's own module otherwise."""
    return _EXPERT.sub(r"\1", module_of(name))
