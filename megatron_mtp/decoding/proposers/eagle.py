"""Drafting with the drafters of one layer (model/eagle3.py, model/eagle.py): chains, and trees.

A new row's input is what the trunk's forward leaves behind: the feature beside its state for EAGLE-3, the state itself
for EAGLE. A drafted row's input is the drafter's own state. Trees grow anew in every step, as EAGLE-2's do.
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


class EagleChain(ReusedLayer):
    """Drafts a chain with an EAGLE drafter."""

    line = "an EAGLE drafter, which reads the trunk's last state, any K"
    depths = "eagle"
    keeps_states = False


class EagleTree(Tree):
    """Drafts a tree with an EAGLE drafter."""

    line = "a tree grown with an EAGLE drafter"
    depths = "eagle"
