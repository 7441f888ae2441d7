"""Checkpoints: read, convert between Hugging Face and Megatron, and verify. Each folder imports those above it.
Megatron's format is read and written in `megatron/checkpoint/`.

hf/            Hugging Face folders: config, tensors, the Hub
families/      the rules of each model family
convert/       both directions, attaching and dropping MTP layers; streamed and resumable
verify/        whether a folder and a checkpoint are the same model
audit/         the contents of any checkpoint, and explanations of differences between two
model.py       the model of a Megatron checkpoint, built from its arguments
inspecting.py  the contents of a folder or checkpoint, from names and shapes
"""
