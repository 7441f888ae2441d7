"""Helpers that every package uses. Nothing here imports torch.

errors.py      report an error as one sentence, with an exit status
command.py     what every command does around its work: streams, exit status, optional packages
progress.py    progress bars for work that takes minutes
files.py       write files so that a killed process leaves no partial output
outputs.py     one process at a time writes an output, and never inside of its own source
acceptance.py  count accepted drafts; training and decoding share one class
record.py      the recorded acceptance of a folder, read or carried along
old_names.py   keep the previous release's documented imports working
"""
