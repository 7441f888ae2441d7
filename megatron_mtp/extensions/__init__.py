"""Optional parts. Each registers its verbs or backends by entry points, and the core imports none of them.

predict/   what other engines will accept of the drafts, by their own rules
report/    one page of runs and of their drafts
"""
