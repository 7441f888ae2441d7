"""The trunk with its MTP block: hidden states in, one hidden state per depth out."""
