"""Restores Megatron's global state between launch lines."""

from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.training.global_vars import unset_global_variables


def forget() -> None:
    """Reset Megatron's global arguments, tokenizer and batch sizes."""
    unset_global_variables()
    unset_num_microbatches_calculator()
