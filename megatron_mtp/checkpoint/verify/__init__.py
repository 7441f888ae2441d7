"""Verification that a Hugging Face folder and a Megatron checkpoint are the same model.

verify.py           compare tensors bit by bit, settings, and logits of trunk and MTP layers
prompt.py           tokens and positions on which two models are compared; float32 products without TF32
reference.py        logits of a folder by transformers, in a separate process
reference_forms.py  how each family stores its MTP layers, as engines load them; a config with transformers' defaults
drafters.py         whether a drafter's folder is the drafter of a checkpoint
forms.py            whether a GPT checkpoint and a hybrid one are the same model
"""
