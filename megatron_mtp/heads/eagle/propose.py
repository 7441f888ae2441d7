"""Drafting with EAGLE: chains, and trees that grow anew in every step, as EAGLE-2's do.

A new row's input is the trunk's state, and a drafted row's the drafter's own.
"""

from megatron_mtp.decoding.proposers.mtp import ReusedLayer
from megatron_mtp.decoding.proposers.tree import Tree


class EagleChain(ReusedLayer):
    """Drafts a chain with an EAGLE drafter."""

    line = "an EAGLE drafter, which reads the trunk's last state, any K"
    depths = "eagle"
    keeps_states = False


class EagleTree(Tree):
    """Drafts a tree with an EAGLE drafter."""

    line = "a tree grown with an EAGLE drafter"
    depths = "eagle"
