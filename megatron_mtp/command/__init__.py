"""The one command line, `megatron-mtp VERB ...`: the commands of the other rooms, and a few of its own."""
