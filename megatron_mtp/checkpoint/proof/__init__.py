"""Whether a Hugging Face folder and a Megatron checkpoint are the same model.

verify.py           the proof: tensors bit by bit, settings, logits of trunk and depths
prompt.py           the tokens and positions on which two models are compared
folder_config.py    what a config.json says of the computation, with the defaults of transformers' class
reference.py        what a folder computes, by transformers alone, in a process of its own
reference_forms.py  how each family stores its depths, as engines load them
depth_logits.py     Megatron's depths behind a trunk that it cannot run
"""
