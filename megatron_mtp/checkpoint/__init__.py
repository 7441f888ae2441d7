"""Checkpoints: read, converted between Hugging Face and Megatron, and proved equal. Each room imports those above it.

hf/            folders of Hugging Face: config, tensors, the Hub
mcore/         distributed checkpoints of Megatron: iterations, tensors, integrity
families/      the rules of each model family
convert/       both directions, MTP layers attached and dropped, all streamed and resumable
verify/        whether a folder and a checkpoint are the same model
audit/         what is in anyone's checkpoint, and what explains the difference of two
inspecting.py  what a folder or checkpoint holds
"""
