"""Substitutions by which Megatron runs without CUDA, over gloo.

substitutions.py   a table of what is substituted in a process, each row with its reason
stand_ins.py       what is put there: streams, events, random state, device strings
"""
