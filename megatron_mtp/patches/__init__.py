"""Megatron functions that are replaced on every machine, with or without a GPU: one table, with a probe for each row.

table.py              THE TABLE: target, reason, upstream issue, versions, probe, replacement; `install()` walks it
patch.py              what a row is, and how it is applied: the original is kept, a mended fault is left alone
probes.py             the probes: each calls the original with tiny inputs or reads its code
compiled_helpers.py   datasets without a compiler
experts.py            token counts of the MoE router
head_gradients.py     fused weight gradients with TE and without Apex
optimizer_slices.py   the distributed optimizer's slices behind padding
positions.py          depths behind a trunk with YaRN
torch_adam.py         a distributed optimizer that resumes without Apex and TE
frozen_stages.py      checkpoints of pipeline stages that have nothing to train
unpickling.py         catalogues and objects of checkpoints are read without running code
checksums.py          checksums of what a checkpoint holds: made when it is saved, compared when it is loaded
saving.py             saves: the helper process ends with its rank, and a save in progress does not look whole
"""
