"""Checkpoints: read, converted between Hugging Face and Megatron, and proved equal. Each room imports those above it.
Megatron's format is read and written in `megatron/checkpoint/`.

hf/            folders of Hugging Face: config, tensors, the Hub
families/      the rules of each model family
convert/       both directions, MTP layers attached and dropped, all streamed and resumable
verify/        whether a folder and a checkpoint are the same model
audit/         what is in anyone's checkpoint, and what explains the difference of two
model.py       the model of a Megatron checkpoint, built from its arguments
inspecting.py  what a folder or checkpoint holds
"""
