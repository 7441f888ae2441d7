"""Megatron functions that are replaced on every machine, with or without a GPU: one table, with a probe for each row.

table.py              THE TABLE: target, reason, upstream issue, versions, probe, replacement; `install()` walks it
patch.py              what a row is, and how it is applied: the original is kept, a mended fault is left alone
                      each file below has the replacements of a subject, and their probes: is the fault there?
layers.py             routers of experts, YaRN beside MTP, fused weight gradients; data sets without a compiler
saving.py             saves: the helper process ends with its rank, and a save in progress does not look whole;
                      the distributed optimizer in checkpoints, also torch's and that of stages without training
"""
