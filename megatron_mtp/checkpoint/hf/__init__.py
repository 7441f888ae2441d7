"""Hugging Face folders. Nothing here depends on Megatron.

config.py     config.json, read with checks
forms/        forms of quantized weights (FP8, NVFP4, AWQ, GPTQ, ...): their tensors, scales and decoding
quantized.py  quantized weights of a folder, its quantization config, and lists of modules
folder.py     a folder's tensors, one at a time; folders that do not convert (bitsandbytes, LoRA, GGUF, ...)
writer.py     safetensors files, written in place
hub.py        a model by its name on the Hugging Face Hub
"""

Shape = tuple[int, ...]


def by(shape: Shape) -> str:
    """Format a shape for a message: 4x6."""
    return "x".join(map(str, shape)) or "1"
