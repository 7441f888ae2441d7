"""Texts that a model writes itself, from the prompts of a corpus: what depths are trained on that shall draft for it.

prompts.py   beginnings of documents, or the user's turns of conversations, drawn by seed
writing.py   the model continues every prompt, many at once; finished texts on the disk, of which a kill loses none
"""
