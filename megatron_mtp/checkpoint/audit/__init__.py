"""What is in anyone's checkpoint, and whether two are the same model; nothing refuses what it can describe.

finding.py     findings: severity, guess, sentence, what to do
entry.py       a tensor of either side; equal bit by bit, in pieces
side.py        a folder or a checkpoint, as far as it can be read
json_files.py  config, generation and tokenizer files: readable, and of the right kinds
folder.py      opens a Hugging Face folder: config, index, headers, unindexed files
saved.py       opens a Megatron checkpoint, of Megatron-LM, Megatron-Bridge or ms-swift
parts.py       trunk, depth, embedding or head, by a tensor's name
contents.py    does a side hold what its config says
copies.py      tied heads, and what depths repeat
values.py      numbers that no trained weight has
pairing.py     which tensor of one side is which of the other
guesses.py     how one tensor's numbers became another's
moves.py       numbers that stand under another name
comparing.py   the tensors of both sides, and what explains their differences
settings.py    config keys and arguments that change the computation
logits.py      what both sides compute
auditing.py    the whole audit, as plain data
"""
