"""Optional parts. Each registers its verbs or backends by entry points, and the core imports none of them.

cpu_rows/  few rows through all layers in one call of compiled code, on a CPU
predict/   what other engines will accept of the drafts, by their own rules
report/    one page of runs and of their drafts
"""
