"""Drafting with an EAGLE drafter (model/eagle.py): chains, and trees, which grow anew in every step as EAGLE-2's do.

A new row's input is the state that the trunk's forward leaves behind; a drafted row's is the drafter's own state.
"""

from megatron_mtp.decoding.proposers.mtp import Eagle
from megatron_mtp.decoding.proposers.tree import Tree


class EagleChain(Eagle):
    """A chain of an EAGLE drafter."""

    line = "an EAGLE drafter, which reads the trunk's last state, any K"
    depths = "eagle"
    keeps_states = False


class EagleTree(Tree):
    """A tree."""

    line = "a tree grown with an EAGLE drafter"
    depths = "eagle"
