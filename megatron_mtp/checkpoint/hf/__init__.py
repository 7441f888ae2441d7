"""Hugging Face folders; nothing here depends on Megatron.

config.py  config.json, read with checks
kinds.py   folders that cannot be read (GPTQ, LoRA, GGUF, ...), and what to do instead
shards.py  safetensors, a tensor at a time; FP8 weights are read with their block scales
hub.py     a model by its name on the Hugging Face Hub
"""
