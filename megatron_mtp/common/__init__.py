"""What every room uses, without torch.

errors.py      how a command that cannot go on ends: one sentence and an exit status
progress.py    bars of work that takes minutes
files.py       how files are written so that a kill leaves nothing half-written
acceptance.py  how often drafts are accepted: one class counts, for training and decoding
old_names.py   documented imports of the release before
"""
