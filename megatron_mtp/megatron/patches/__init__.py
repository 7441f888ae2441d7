"""Megatron functions that are replaced on every machine, with or without a GPU: one table, with a probe for each row.

table.py              THE TABLE: target, reason, upstream issue, versions, probe, replacement; `install()` applies it
loop.py               functions of the training loop that a run wraps, as such rows
patch.py              what a row is and how it is applied: originals are kept, fixed bugs are left alone
                      each file below has the replacements for one subject and their probes: is the bug present?
code.py               what probes ask of a function's code
layers.py             expert routers, YaRN with MTP, fused weight gradients; data sets without a compiler
reading.py            checkpoints: read without running code, a checksum for every entry
saving.py             saves: the helper process ends with its rank, and an unfinished save does not look complete;
                      the distributed optimizer in checkpoints, also torch's and that of stages without training
"""
