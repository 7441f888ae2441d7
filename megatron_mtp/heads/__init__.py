"""Kinds of drafters, a folder each.

No file imports them by name: each kind is registered by an entry point, like that of another package, and its row
(`spec.kinds.DrafterKind`) names its parts and declares its settings.

eagle/    one layer that reads the trunk's last hidden state
eagle3/   one layer that reads the states of three trunk layers
peagle/   several layers that read three trunk layers and draft all tokens in one pass
dflash/   a block of tokens in one pass
domino/   a block with a bias by all previous tokens of it
dspark/   a block with a bias by the previous token, and a confidence
dflash2/  convolutions along a block, and a choice among likely tokens
"""
