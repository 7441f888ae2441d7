"""Texts that a model writes itself, from the prompts of a corpus: what depths are trained on that shall draft for it.

prompts.py   beginnings of documents, or the user's turns of conversations, drawn by seed
journal.py   finished texts on the disk: none is lost, and texts of other settings are refused
writing.py   the model continues every prompt, many at once
"""
