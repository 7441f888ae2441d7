"""Multi-Token Prediction for GPT models trained with Megatron-Core.

config.py      MTPConfig: every setting of the MTP layers, whose fields become the --mtp-* flags
spec/          what draft heads are, as plain data
errors.py      how a command that cannot go on ends: one sentence and an exit status
progress.py    bars of work that takes minutes
files.py       how files are written so that a kill leaves nothing half-written
acceptance.py  how often drafts are accepted: one class counts, for training and decoding
runtime.py     prepare(): Megatron made runnable on this machine; which libraries of kernels can be used
registry.py    tables to which other packages add rows: losses, proposers, verifiers, families
patches/       faults of the published megatron-core that are put right
cpu.py         what Megatron needs to run without CUDA
data/          text to tokens to batches; the shifts of every depth
model/         from arguments to a model: the trunk, the MTP block, sharing, freezing, initialization
losses/        what the MTP layers are trained on
checkpoint/    checkpoints read, converted between Hugging Face and Megatron, and proved equal
decoding/      speculative decoding with the trained MTP layers
training/      one run on Megatron's training loop
attach.py      MTP layers on a model that Megatron or a framework has built, for training loops of its own
server/        OpenAI's HTTP API in front of an engine of many texts
cli/           the verbs of megatron-mtp
__main__.py    python -m megatron_mtp
extensions/    optional parts, which the core does not import
"""

__version__ = "0.2.0"
