"""Depths behind a trunk with YaRN, which Megatron's check of the arguments refuses: its own MTP has no such angles.

Our depths get the trunk's angles, and their attention has the same factor.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any


def with_yarn(validate_args: Callable[..., Any]) -> Callable[..., Any]:
    """`validate_args`, which looks at a model with YaRN and depths as at one with plain rotary positions."""

    @wraps(validate_args)
    def validate(args: Namespace, *others: Any, **named: Any) -> Any:
        if args.position_embedding_type != "yarn":
            return validate_args(args, *others, **named)
        args.position_embedding_type, args.apply_rope_fusion = "rope", False
        try:
            return validate_args(args, *others, **named)
        finally:
            args.position_embedding_type = "yarn"

    return validate
