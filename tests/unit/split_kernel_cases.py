"""Attention in parts in Triton's interpreter, against torch's: prints the largest differences as JSON.

TRITON_INTERPRET=1 python split_kernel_cases.py tree faults
"""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from interpreted import compute_bfloat16_as_a_gpu, planted
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_mtp.platform import prepare

prepare()

from drafting_single import model_of  # noqa: E402
from megatron_single import join_world_of_one  # noqa: E402

from megatron_mtp.drafting import cached_attention, fused_rows, split_attention, split_kernels  # noqa: E402
from megatron_mtp.drafting.api import generate  # noqa: E402
from megatron_mtp.drafting.kv_cache import Rows, ancestors_of, chain_rows, tree_rows  # noqa: E402
from megatron_mtp.drafting.runner import Runner  # noqa: E402

CAPACITY = 110

CHAINS: dict[str, tuple[int, int, int, int, int, int]] = {
    "one row": (1, 4, 4, 1, 8, 8),
    "groups": (1, 4, 2, 3, 16, 16),
    "one key head": (2, 6, 1, 4, 8, 8),
    "odd channels, other values": (2, 4, 2, 2, 10, 20),
}
"""Texts, query heads, key heads, rows, channels of a key and of a value."""


@torch.inference_mode()
def main(wanted: list[str]) -> None:
    join_world_of_one()
    logging.disable()
    compute_bfloat16_as_a_gpu()
    split_attention.BLOCK_W = 16
    kinds = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    parts: dict[str, Callable[[], Any]] = {
        "chains": lambda: {
            name: {kind: chains(given, dtype) for kind, dtype in kinds.items()} for name, given in CHAINS.items()
        },
        "tree": tree,
        "many rows": lambda: chains((1, 4, 2, 19, 8, 8), torch.float32),
        "one part": lambda: chains(CHAINS["groups"], torch.float32, each=128),
        "same texts": same_texts,
        "faults": lambda: {fault: faulty(*given) for fault, given in FAULTS.items()},
    }
    print(json.dumps({name: parts[name]() for name in wanted}))


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chains(sizes: tuple[int, ...], dtype: torch.dtype, each: int = 32) -> float:
    """Texts of unequal length, the second with a row of padding, over a window that ends within a part."""
    batch, *_, rows, _, _ = sizes
    return difference(sizes, chain_rows(torch.tensor([70, -1])[:batch], rows, 101, CAPACITY), dtype, each)


def tree() -> float:
    """Rows that see their ancestors alone, in the last two parts."""
    ancestors_BRR, depth_BR = ancestors_of(torch.tensor([[0, 0, 1, 2, 2], [0, 1, 1, 0, 4]]))
    rows = tree_rows(torch.tensor([60, 90]), depth_BR, ancestors_BRR, 101)
    return difference((2, 4, 2, 6, 8, 8), rows, torch.float32, 32)


def difference(sizes: tuple[int, ...], rows: Rows, dtype: torch.dtype, each: int) -> float:
    """From torch's attention in float64; relative to the largest number."""
    batch, heads, groups, count, channels, values = sizes
    query = 2 * normal(batch, heads, count, channels, dtype=dtype, seed=1)
    key = normal(batch, groups, CAPACITY + 1, channels, dtype=dtype, seed=2)[:, :, : rows.window]
    value = normal(batch, groups, CAPACITY + 1, values, dtype=dtype, seed=3)[:, :, : rows.window]
    made = split_attention.attend_in_parts(query, key, value, rows.mask_B1RW, 0.4, each).permute(1, 2, 0, 3)
    assert made.dtype == dtype
    exact = (query.double(), key.double(), value.double(), rows.mask_B1RW.double())
    wanted = scaled_dot_product_attention(*exact, scale=0.4, enable_gqa=True)
    distance = (made.double() - wanted).abs().max() / wanted.abs().max()
    return float(distance.nan_to_num(1e9))


def same_texts() -> bool:
    """Whether a model that splits every attention emits the tokens of one that splits none, chains and trees."""
    target, prompts = Runner(model_of("gqa", 1, torch.float32)), [[5, 9], [7]]
    wanted, split = generate(target, prompts, 3).token_ids, []

    def watched(*given: Any) -> Tensor:
        split.append(1)
        return split_attention.split_attention(*given)

    with (
        mock.patch.object(split_attention, "LEAST_WINDOW", 0),
        mock.patch.object(split_attention, "LEAST_EACH", 16),
        mock.patch.object(split_attention, "processors", return_value=132),
        mock.patch.object(split_attention, "has_kernels", lambda query: query.dtype in fused_rows.DTYPES),
        mock.patch.object(cached_attention, "split_attention", watched),
    ):
        made = [
            generate(target, prompts, 3, speculative=settings).token_ids
            for settings in ({"method": "mtp", "num_speculative_tokens": 1}, {"method": "mtp_tree", "tree": [2]})
        ]
    return made == [wanted] * 2 and len(split) > 10


GROUPS, TREE = "groups", "tree"
FAULTS = {
    "scale": (GROUPS, '"ieee") * scale + added_MW', '"ieee") + added_MW'),
    "mask": (GROUPS, "* scale + added_MW", "* scale"),
    "masks of other rows": (TREE, "(row_M % rows)[:, None]", "row_M[:, None] // rows"),
    "masks of another text": (TREE, "masks += text * mask_stride_B +", "masks +="),
    "slots beyond the window": (GROUPS, 'tl.where(is_slot_W[None, :], score_MW, float("-inf"))', "score_MW + 0.0"),
    "sum of a part": (GROUPS, "total_M = total_M * shrunk_M +", "total_M = total_M +"),
    "values of a part": (GROUPS, "made_MD * shrunk_M[:, None] + own_MD", "made_MD + own_MD"),
    "key head": (GROUPS, "group * key_stride_G", "0 * key_stride_G"),
    "value head": (GROUPS, "group * value_stride_G", "0 * value_stride_G"),
    "text": (TREE, "keys += text * key_stride_B", "keys += 0 * key_stride_B"),
    "weights of the merge": (GROUPS, "tl.sum(made_PD * weight_P[:, None], axis=0)", "tl.sum(made_PD, axis=0)"),
    "sum of the merge": (GROUPS, "tl.sum(total_P * weight_P)", "tl.sum(total_P)"),
    "place of a text": (TREE, "(row * batch + text)", "(text * rows + row)"),
    "place of a query": (GROUPS, "own // rows, own % rows", "own % QUERIES, own // QUERIES"),
}
"""Faults to plant in the kernels: what they spoil, and what of the source becomes what."""


def faulty(cases: str, old: str, new: str) -> float:
    with planted(split_kernels, old, new):
        return tree() if cases == TREE else chains(CHAINS[GROUPS], torch.float32)


if __name__ == "__main__":
    main(sys.argv[1:])
