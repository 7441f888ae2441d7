"""Source and target folders of grafts, and their tensors."""

import json
import re
from pathlib import Path

from hf_models import Tensors, read, write

from megatron_mtp.megatron.checkpoint.reader import DistReader

OCR = "model.language_model.layers."


def lost(folder: Path) -> Path:
    """Return the folder as transformers saves it: without MTP layers, although its config counts them."""
    tensors, keys = read(folder), json.loads((folder / "config.json").read_text())
    layers = keys.get("text_config", keys).get("num_hidden_layers", 99)
    of_depths = (
        *("model.mtp", "mtp.", "llm.mtp.", "language_model.mtp."),
        *(f"model.layers.{layers + k}." for k in range(3)),
        *(f"{OCR}{layers + k}." for k in range(3)),
    )
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(of_depths)}
    assert len(kept) < len(tensors)
    write(folder, kept)
    return folder


def tensors(folder: Path) -> Tensors:
    reader = DistReader(folder)
    return {key: reader.read(key) for key in reader.keys}


OF_DEPTHS = re.compile(rf"mtp\.|carried\.((model\.)?mtp|{OCR}[345]\.)")
