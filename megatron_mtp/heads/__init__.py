"""Kinds of drafters, a folder each. No file imports them by name: a kind is registered by an entry point, as that of
another package is, and its row (`spec.kinds.DrafterKind`) names its parts.

eagle/    one layer that reads the trunk's last state
eagle3/   one layer that reads three of the trunk's layers
peagle/   layers that read three of the trunk's, and draft all tokens in one pass
dflash/   a block of tokens in one pass
domino/   a block whose drafts know all tokens before them in it
dspark/   a block whose drafts know the token before, with a confidence
dflash2/  convolutions along a block, and a choice among likely tokens
"""
