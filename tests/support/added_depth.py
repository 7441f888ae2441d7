"""A folder of a model with one more MTP layer."""

import json
from pathlib import Path

import torch
from hf_models import read, write
from quantized_models import with_keys


def with_depth(folder: Path) -> None:
    """Turn the third layer of GLM-5 into an MTP layer."""
    tensors, place = read(folder), "model.layers.2."
    shapes = {"eh_proj": (48, 96), "enorm": (48,), "hnorm": (48,), "shared_head.norm": (48,)}
    write(folder, tensors | {f"{place}{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()})
    keys = json.loads((folder / "config.json").read_text())
    short = {name: value[:2] for name, value in keys.items() if isinstance(value, list) and len(value) == 3}
    with_keys(folder, **short, num_hidden_layers=2, num_nextn_predict_layers=1)
