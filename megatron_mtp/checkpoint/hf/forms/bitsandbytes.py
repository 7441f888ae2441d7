"""Formats of bitsandbytes, which are described but not decoded."""

from collections.abc import Mapping

import torch

from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.forms.form import FLOATS, Form, Numbers, StoredPart, Types


def _unknown_shape(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape | None:
    shape, dtype = parts["weight"]
    return shape if dtype == torch.int8 else None


_BYTE: Types = (torch.uint8,)
INT8 = Form(
    "bitsandbytes, int8",
    "weight",
    (torch.int8,),
    {"SCB": FLOATS},
    _unknown_shape,
    None,
    more={"weight_format": _BYTE},
    methods=("bitsandbytes",),
    engines="vLLM, transformers",
)
FOUR_BITS = Form(
    "bitsandbytes, 4 bits",
    "weight",
    _BYTE,
    {"weight.absmax": FLOATS + _BYTE},
    _unknown_shape,
    None,
    more=dict.fromkeys(("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"), FLOATS),
    methods=("bitsandbytes",),
    engines="vLLM, transformers",
)
