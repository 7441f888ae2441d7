"""The forward step, metrics and arguments for Megatron's training loop; there is no loop of our own."""
