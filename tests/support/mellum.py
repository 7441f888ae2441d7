"""A model whose MTP layer uses its own tensor names."""

from pathlib import Path

import torch
from hf_models import read, write


def mellum_head(folder: Path) -> Path:
    """Give Mellum 2 an MTP layer: a layer like the trunk's, with Qwen's names."""
    tensors = read(folder)
    layer = {f"mtp.{n[6:].replace('.2.', '.0.', 1)}": t for n, t in tensors.items() if n.startswith("model.layers.2.")}
    frame = {f"mtp.{n}.weight": torch.ones(48) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    projection = {"mtp.fc.weight": torch.randn(48, 96)}
    write(folder, tensors | {n: torch.rand_like(t.float()).bfloat16() for n, t in (layer | frame | projection).items()})
    return folder
