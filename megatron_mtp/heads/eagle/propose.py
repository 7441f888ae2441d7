"""Drafting with EAGLE: chains, and dynamic trees as in EAGLE-2.

The input of a new row is the trunk's state, and that of a drafted row the drafter's own state.
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
