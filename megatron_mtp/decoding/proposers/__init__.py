"""Proposers of `config.PROPOSERS`: each drafts in its own way, and states its facts and settings (`types.Proposer`).

mtp.py            trained depths: sequential, one reused, parallel heads; EAGLE-3
tree.py           trees and beams of the first depth's or an EAGLE-3 drafter's tokens
block_drafter.py  blocks of tokens in one pass of a drafter
ngram.py          what followed the same tokens before; n-grams from the trunk's own guesses
draft_model.py    a smaller model
"""
