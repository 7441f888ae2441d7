"""What is in anyone's checkpoint, and whether two are the same model; nothing refuses what it can describe.

finding.py       findings: severity, guess, sentence, what to do
side.py          a folder or a checkpoint, as far as it can be read; the parts of a model by names
quantization.py  quantized weights, and whether the config lists them as they are stored
folder.py        opens a Hugging Face folder: config, index, headers, JSON files, token ids
saved.py         opens a Megatron checkpoint, of Megatron-LM, Megatron-Bridge or ms-swift
contents.py      does a side hold what its config says, by the plan of its conversion
pairing.py       which tensor of one side is which of the other, by the same plan
numbers.py       copies that differ, and numbers that no trained weight has
comparing.py     the tensors of both sides, and how they differ
settings.py      config keys and arguments that change the computation
logits.py        what both sides compute
auditing.py      the whole audit, as plain data
"""
