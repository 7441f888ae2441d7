"""Proposers of `config.PROPOSERS`: each drafts in its own way, and states its facts and settings (`proposer.Proposer`).

proposer.py       what every proposer is
plain.py          nothing is drafted
mtp.py            trained depths: sequential, one reused, parallel heads
tree.py           trees and beams of the first depth's tokens
eagle3.py         chains and trees of an EAGLE-3 drafter
block_drafter.py  blocks of tokens in one pass of a drafter
ngram.py          what followed the same tokens before; n-grams from the trunk's own guesses
draft_model.py    a smaller model
"""
