"""Drafting with EAGLE-3: chains, and trees that grow anew in every step.

A new row's input is the feature that the trunk's forward leaves behind, and a drafted row's the drafter's own state.
"""

from megatron_mtp.decoding.proposers.mtp import ReusedLayer
from megatron_mtp.decoding.proposers.tree import Tree


class Eagle3Chain(ReusedLayer):
    """Drafts a chain with an EAGLE-3 drafter."""

    line = "an EAGLE-3 drafter, which reads three of the trunk's layers, any K"
    depths = "eagle3"
    keeps_states = False


class Eagle3Tree(Tree):
    """Drafts a tree with an EAGLE-3 drafter."""

    line = "a tree grown with an EAGLE-3 drafter"
    depths = "eagle3"
