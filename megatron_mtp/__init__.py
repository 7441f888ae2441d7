"""Multi-Token Prediction for GPT models trained with Megatron-Core.

common/        what every room uses: errors, files, progress, counts of accepted drafts
spec/          what MTP layers and draft heads are, as plain data: settings, kinds, tables of names
megatron/      all that is about Megatron's own code: runtime, CPU stand-ins, patches, distributed checkpoints
data/          text to tokens to batches; the shifts of every depth
model/         from arguments to a model: the trunk, the MTP block, sharing, freezing, initialization
losses/        what the MTP layers are trained on
checkpoint/    checkpoints read, converted between Hugging Face and Megatron, and proved equal
heads/         kinds of drafters, a folder each; registered by entry points, and imported by no file
decoding/      speculative decoding with the trained MTP layers
training/      one run on Megatron's training loop
attach.py      MTP layers on a model that Megatron or a framework has built, for training loops of its own
server/        OpenAI's HTTP API in front of an engine of many texts
cli/           the verbs of megatron-mtp
__main__.py    python -m megatron_mtp
extensions/    optional parts, which the core does not import
"""

from megatron_mtp.common.old_names import keep_old_names

__version__ = "0.2.0"

keep_old_names()
