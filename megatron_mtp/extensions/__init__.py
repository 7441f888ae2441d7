"""Optional parts. Each registers verbs, backends or flags of `doctor` by entry points, and the core imports none.

cpu_rows/  few rows through all layers in one call of compiled code, on a CPU
kernels/   the losses' kernels without a GPU: registers, occupancy, expected time
plan/      memory, time and placement of a run on N GPUs, by arithmetic
predict/   what other engines will accept of the drafts, by their own rules
prove/     whether the MTP of the Megatron that a lab already runs is right
report/    one page of runs and of their drafts
"""
