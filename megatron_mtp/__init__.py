"""Multi-Token Prediction for GPT models trained with Megatron-Core.

common/        helpers that every package uses: errors, files, progress, acceptance counts
spec/          settings of MTP layers and drafters as plain data: settings, kinds, tables of names
megatron/      everything that depends on Megatron's own code: runtime, CPU substitutes, patches, checkpoints
data/          text to tokens to batches, shifted by depth
model/         from arguments to a model: trunk, MTP block, sharing, freezing, initialization
losses/        losses of MTP layers and drafters
checkpoint/    read checkpoints, convert them between Hugging Face and Megatron, and verify them
heads/         kinds of drafters, a folder each; registered by entry points, never imported by name
decoding/      speculative decoding with trained MTP layers
training/      one run on Megatron's training loop
attach.py      MTP layers on a model that Megatron or a framework has built, for custom training loops
server/        OpenAI-compatible HTTP server in front of an engine
cli/           the commands of megatron-mtp
__main__.py    python -m megatron_mtp
extensions/    optional parts, which the core does not import
"""

from megatron_mtp.common.old_names import keep_old_names

__version__ = "0.2.0"

keep_old_names()
