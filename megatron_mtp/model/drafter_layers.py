"""Layers of a trunk that a drafter reads, and Megatron's arguments of a model that has one."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_mtp.config import BESIDE_MTP, BLOCK_LAYERS, EAGLE3, drafted_steps, stands_beside

FEATURES = 3
"""Layers of the trunk that an EAGLE-3 drafter reads; others read any number."""


def default_layers(layers: int, kind: str = EAGLE3, depth: int | None = None) -> tuple[int, ...]:
    """The layers that are read of a trunk of so many.

    A number counts the layers before the state, as the config key `eagle_aux_hidden_state_layer_ids` does. EAGLE-3
    reads after 2, after half and after all but three of them; a block drafter reads as many as it has layers of its
    own, from the second to the last but two at equal distances.
    """
    if kind == EAGLE3:
        return 2, layers // 2, layers - 3
    count, last = min(depth or BLOCK_LAYERS, layers - 1), max(layers - 2, 2)
    if count == 1:
        return (min(layers // 2 + 1, layers - 1),)
    made = {2 + round(number * (last - 2) / (count - 1)) for number in range(count)}
    return tuple(sorted(made))


def can_read(chosen: Sequence[int], layers: int, kind: str = EAGLE3) -> bool:
    """Return whether a drafter can read these layers of a trunk that has so many."""
    count = FEATURES if kind == EAGLE3 else max(len(chosen), 1)
    return len(chosen) == count and [*chosen] == sorted(set(chosen)) and chosen[0] >= 1 and chosen[-1] < layers


def check_layers(chosen: tuple[int, ...], layers: int, kind: str = EAGLE3) -> None:
    """Raises ValueError where `can_read` does not hold."""
    if not can_read(chosen, layers, kind):
        count = f"{FEATURES} " if kind == EAGLE3 else ""
        raise ValueError(
            f"--drafter-layers is {' '.join(map(str, chosen))}, and the trunk has {layers} layers; give {count}"
            f"rising numbers from 1 to {layers - 1}, each the number of layers before the state that is read."
        )


def as_mtp_layers(steps: int) -> dict[str, Any]:
    """Megatron's arguments of a model with a drafter: an MTP layer in so many passes, on a frozen trunk."""
    return {
        "mtp_num_layers": 1,
        "mtp_use_repeated_layer": True,
        "mtp_unroll": steps,
        "mtp_repeated_layer_shares_kv": False,
        "mtp_architecture": "sequential",
        "mtp_init": None,
        "mtp_train_only": True,
        "mtp_loss_scaling_factor": 1.0,
        BESIDE_MTP: False,
    }


def alone(args: Namespace, is_drafter: bool) -> Namespace:
    """The arguments of a model that drafts with one of two: with the drafter, or with the MTP layers beside it."""
    if not stands_beside(args):
        return args
    steps: int = drafted_steps(args)
    changes = as_mtp_layers(steps) if is_drafter else {"drafter": None, BESIDE_MTP: False}
    return Namespace(**{**vars(args), **changes})
