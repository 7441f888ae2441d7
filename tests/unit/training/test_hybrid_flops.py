"""The FLOPs in Megatron's log include every pass of a repeated layer."""

from argparse import Namespace
from typing import Any

import pytest
from megatron.training import training

from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.training.metrics import Metrics
from megatron_mtp.training.run import observed

pytestmark = pytest.mark.usefixtures("megatron")

SIZES = (
    "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --kv-channels 8 --seq-length 16 --swiglu "
    "--max-position-embeddings 16"
)
KINDS = {"GPT": "--num-layers 2", "hybrid": "--hybrid-layer-pattern M-|*-"}


def arguments(kind: str, depths: int, **changes: Any) -> Namespace:
    pattern = "/*-" * depths if kind == "hybrid" else ""
    args = parsed([*SIZES.split(), *f"{KINDS[kind]}{pattern}".split()], 96)
    if kind == "hybrid":
        args.hybrid_layer_pattern = KINDS[kind].split()[1] + pattern
    return Namespace(**{**vars(args), "mtp_num_layers": depths, "padded_vocab_size": 128, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_counted_as_depths(kind: str) -> None:
    plain = training.num_floating_point_operations
    with observed(Metrics(None)):
        counted = training.num_floating_point_operations(arguments(kind, 1, mtp_unroll=3), 4)
        once = training.num_floating_point_operations(arguments(kind, 1), 4)
    assert counted == plain(arguments(kind, 3), 4)
    assert once == plain(arguments(kind, 1), 4) < counted
    assert training.num_floating_point_operations is plain
