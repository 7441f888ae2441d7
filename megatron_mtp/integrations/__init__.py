"""For training scripts that are not ours: they keep running, with the depths of this package.

megatron_lm.py  two lines for a copy of Megatron-LM's pretrain_gpt.py
"""
