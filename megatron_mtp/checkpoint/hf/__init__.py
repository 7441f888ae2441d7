"""Hugging Face folders; nothing here depends on Megatron.

config.py     config.json, read with checks
kinds.py      folders that cannot be read (GPTQ, LoRA, GGUF, ...), and what to do instead
shards.py     safetensors, a tensor at a time
quantised.py  FP8 and MXFP4 weights with their scales, as bfloat16
hub.py        a model by its name on the Hugging Face Hub
"""
