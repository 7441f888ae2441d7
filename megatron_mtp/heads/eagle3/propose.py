"""Drafting with EAGLE-3: chains and dynamic trees.

The input of a new row is the feature from the trunk's forward pass, and that of a drafted row the drafter's own state.
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
