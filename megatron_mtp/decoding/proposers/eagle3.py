"""Drafting with an EAGLE-3 drafter (model/eagle3.py): chains, and trees.

A new row's input is the feature that the trunk's forward leaves behind its state; a drafted row's is the drafter's own
state.
"""

from megatron_mtp.decoding.proposers.mtp import Eagle
from megatron_mtp.decoding.proposers.tree import Tree


class Eagle3(Eagle):
    """A chain."""

    line = "an EAGLE-3 drafter, which reads three of the trunk's layers, any K"
    depths = "eagle3"
    keeps_states = False


class Eagle3Tree(Tree):
    """A tree."""

    line = "a tree grown with an EAGLE-3 drafter"
    depths = "eagle3"
