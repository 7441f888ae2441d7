"""Proposers, the drafting methods of `config.PROPOSERS`. Each declares its facts and settings (`proposer.Proposer`).
Methods of a kind of drafter are in the drafter's folder of `heads/`.

proposer.py       base class of all proposers
plain.py          plain decoding, without drafts
mtp.py            trained MTP layers: sequential, one reused, parallel heads
tree.py           trees and beams, grown with the first MTP layer or with what a subclass runs
blocks.py         blocks of tokens in one pass of a drafter
ngram.py          prompt lookup; lookahead decoding with n-grams from the trunk's own guesses
draft_model.py    a smaller model: chains, beams and trees
exhaustive.py     every sequence of a few tokens
"""
