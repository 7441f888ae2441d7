"""Proposers of `config.PROPOSERS`: each drafts in its own way, and states its facts and settings (`proposer.Proposer`).
Those of a kind of drafters are in its folder of `heads/`.

proposer.py       what every proposer is
plain.py          nothing is drafted
mtp.py            trained MTP layers: sequential, one reused, parallel heads
tree.py           trees and beams, grown with the first depth or with what a subclass runs
blocks.py         blocks of tokens in one pass of a drafter
ngram.py          what followed the same tokens before; n-grams from the trunk's own guesses
draft_model.py    a smaller model: chains, beams and trees
exhaustive.py     every sequence of a few tokens
"""
