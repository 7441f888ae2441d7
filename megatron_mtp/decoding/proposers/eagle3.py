"""Drafting with an EAGLE-3 drafter (model/eagle3.py): what the reused first depth does, with another module.

A new row's input is the feature that the trunk's forward leaves behind its state; a drafted row's is the drafter's own
state. So chains, trees, caches and their tests are those of `mtp_eagle` and `mtp_tree`.
"""

from megatron_mtp.decoding.proposers.mtp import Eagle
from megatron_mtp.decoding.proposers.tree import Tree


class Eagle3(Eagle):
    """A chain of any K."""

    line = "an EAGLE-3 drafter, which reads three of the trunk's layers, any K"
    depths = "eagle3"
    keeps_states = False


class Eagle3Tree(Tree):
    """A tree, static or dynamic (EAGLE-2, arXiv:2406.16858), with the settings of `mtp_tree`."""

    line = "a tree grown with an EAGLE-3 drafter"
    depths = "eagle3"
