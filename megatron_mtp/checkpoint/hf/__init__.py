"""Hugging Face folders; nothing here depends on Megatron.

config.py     config.json, read with checks
forms/        the forms of quantized weights (FP8, NVFP4, AWQ, GPTQ, ...): their tensors, scales and decoding
quantized.py  the quantized weights of a folder; what its config says of them, and its lists of modules
folder.py     a folder's tensors, one at a time; folders that do not convert (bitsandbytes, LoRA, GGUF, ...)
writer.py     safetensors files, written in place
hub.py        a model by its name on the Hugging Face Hub
"""

Shape = tuple[int, ...]


def by(shape: Shape) -> str:
    """A shape in a sentence: 4x6."""
    return "x".join(map(str, shape)) or "1"
