"""Hugging Face folders; nothing here depends on Megatron.

config.py     config.json, read with checks
quantized.py  FP8 and MXFP4 weights with their scales, as bfloat16; what a config says of them
folder.py     a folder's tensors, one at a time; folders that do not convert (GPTQ, LoRA, GGUF, ...)
writer.py     safetensors files, written in place
hub.py        a model by its name on the Hugging Face Hub
"""
