"""Quantized exports: which weights get which form, and what `quantization_config` says of them.

    --quantize fp8           trunk     layers' projections: attention, MLP, experts
    --mtp-dtype bfloat16     MTP layers    the same, chosen apart
    never                    embedding, head, eh_proj, routers, norms, recurrent layers, stacked experts

Engines read lists of unquantized modules differently: vLLM compares whole names, SGLang and transformers parts of them
too, compressed-tensors whole names or `re:` patterns. So each module is named as a whole, and the experts of a layer by
their common name.
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
        trunk: of the trunk, a key of `WRITTEN`; None for none.
        depths: of the MTP layers, or `PLAIN` for bfloat16; None leaves them as they are.

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
        """The form in which a rule's tensor is written; None if it is not quantized.

        Args:
            rule, name, shape: of the tensor in the folder.
            in_depth: whether it is an MTP layer's.
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
    """The `quantization_config` of a folder.

    Args:
        coded: the form of every quantized weight, by name.
        plain: the matrices that are not quantized, without the embedding's.
        depths: names of the MTP layers' tensors.
        in_vllm: gives vLLM's name of a module, which is listed beside the folder's.
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
    """Who loads an export, and which of its weights transformers reads wrongly.

    Where transformers decodes FP8 as it loads, it divides the sizes of a weight by those of its grid of scales: rows of
    192 become two blocks of 96, while the form has one of 128 and one of 64 (`Fp8Dequantize` of transformers 5.23).

    Args:
        coded: the form of every quantized weight, by name.
        shapes: of the weights.
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
    """The common module of a layer's experts, for the weight of one; the module of other weights."""
    return _EXPERT.sub(r"\1", module_of(name))
