"""Helpers that every package uses. Nothing here imports torch.

errors.py      report an error as one sentence, with an exit status
progress.py    progress bars for work that takes minutes
files.py       write files so that a killed process leaves no partial output
acceptance.py  count accepted drafts; training and decoding share one class
old_names.py   keep the previous release's documented imports working
"""
