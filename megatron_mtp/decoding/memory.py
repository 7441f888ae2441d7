"""Bytes of an engine's memory: of a block of slots, and of what recurrent layers keep of a sequence that runs."""

from megatron_mtp.decoding.recurrent_state import state_bytes
from megatron_mtp.decoding.rows import BLOCK
from megatron_mtp.decoding.runner import Runner

MOST_GIB = 4.0
"""Cache that is taken unasked."""


def block_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Bytes of one block: keys and values of the trunk, of depths and of a small model, and the trunk's states."""
    layers = sum(one.attending for one in (runner.trunk_keeps, *runner.depths_keep))
    total = (layers * _slot_numbers(runner) + runner.state_size) * runner.dtype.itemsize
    if drafter is not None:
        total += drafter.trunk_keeps.attending * _slot_numbers(drafter) * drafter.dtype.itemsize
    return total * BLOCK


def entry_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Bytes that the recurrent layers of all these keep of one sequence; 0 where there are none."""
    total = sum(
        state_bytes(one, runner.dtype) for part in (runner.trunk_keeps, *runner.depths_keep) for one in part.states
    )
    if drafter is not None:
        total += sum(state_bytes(one, drafter.dtype) for one in drafter.trunk_keeps.states)
    return total


def blocks_in(gib: float, running: int, runner: Runner, drafter: Runner | None = None) -> int:
    """Blocks that so much memory holds, beside what recurrent layers keep of so many running sequences.

    Raises:
        ValueError: not even one.
    """
    each, states = block_bytes(runner, drafter), running * entry_bytes(runner, drafter)
    blocks = int((gib * 2**30 - states) / each) - 1  # one belongs to no sequence
    if blocks < 1:
        least = (2 * each + states) / 2**30
        beside, fewer = (f" beside the states of {running} sequences", ", or run fewer") if states else ("", "")
        raise ValueError(
            f"a cache of {gib} GiB holds no block of {BLOCK} tokens{beside}; give at least {least:.6f}{fewer}."
        )
    return blocks


def blocks_for(running: int, runner: Runner, drafter: Runner | None = None) -> int:
    """Blocks that so many sequences of full length need, as far as `MOST_GIB` holds them; errors as `blocks_in`."""
    each = -(-runner.positions // BLOCK) + 1  # and the drafts behind the last position
    return min(running * each, blocks_in(MOST_GIB, running, runner, drafter))


def _slot_numbers(runner: Runner) -> int:
    """Numbers that a layer keeps of a token."""
    config = runner.model.config
    if config.multi_latent_attention:
        return int(config.kv_lora_rank + config.qk_pos_emb_head_dim)
    groups = config.num_query_groups or config.num_attention_heads
    return int(2 * config.kv_channels * groups // config.tensor_model_parallel_size)
