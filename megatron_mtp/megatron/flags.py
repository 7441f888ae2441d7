"""Flags and values that Megatron accepts but this package does not support: `UNSUPPORTED` and `RANGES`.

New releases of Megatron add flags and fix others; `test_unsupported.py` finds those that no table covers.
"""

import math
import re
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    # "silent": Megatron accepts the value without an error, and what then happens. "crash": it aborts. Here, silent: 0
    # or less is not a valid count, or disables the feature; crash: seq_length, recompute_num_layers and
    # distributed_timeout_minutes end in a signal, a hang or a C++ traceback.
    (
        "1 or more",
        lambda number: number >= 1,
        "seq_length train_iters recompute_num_layers distributed_timeout_minutes moe_router_topk q_lora_rank "
        "kv_lora_rank v_head_dim qk_pos_emb_head_dim make_vocab_size_divisible_by eval_interval exit_interval "
        "exit_duration_in_mins eval_global_batch_size dist_ckpt_workers lr_wsd_decay_iters",
    ),
    ("1 to 100,000", lambda number: 1 <= number <= 100_000, "num_experts"),  # silent; crash: lists all experts
    ("0 or more", lambda number: number >= 0, "eval_iters lr_warmup_iters ckpt_step"),  # silent: treated as 0 or unset
    ("a number above 0", lambda number: 0 < number < math.inf, "loss_scale"),  # silent: all gradients become 0
    ("a number above 0, and at most 1", lambda number: 0 < number <= 1, "rotary_percent"),  # silent: no rotation
    ("a number, 0 for no clipping", math.isfinite, "clip_grad"),  # silent: NaN clips nothing
    ("a number from 0 to less than 1", lambda number: 0 <= number < 1, "sgd_momentum"),  # silent: diverges
)
"""Allowed values of arguments for which Megatron also accepts other values."""


class Unsupported(NamedTuple):
    """A feature that our losses or our script do not support: ignored or computed wrongly (docs/reference/features.md).

    Attributes:
        flags: as on a command line; the row applies to runs with all of them.
        because: what would go wrong, as a clause.
        instead: what to do.
        depths_alone: whether only runs with MTP layers lack it.
    """

    flags: str
    because: str
    instead: str = "drop the flag"
    depths_alone: bool = True

    def is_given(self, args: Namespace) -> bool:
        """Return whether all flags were given, with these values if they have any."""
        given = re.findall(r"--(\S+)(?: (\w\S*))?", self.flags)
        found = [(getattr(args, name.replace("-", "_"), None), value) for name, value in given]
        return all(str(has) == value if value else bool(has) for has, value in found)

    def sentence(self) -> str:
        """The error message."""
        beside = " with --mtp-num-layers" if self.depths_alone else ""
        return f"{self.flags} was given{beside}, but {self.because}; {self.instead}."


_SHARDED = "the losses read the output layer's weight, which it gathers in that layer's own forward alone"
_SIZES = "a depth repeats the trunk's last layer, and here every layer has sizes of its own"
_NO_DEPTHS = "Megatron's GPT has no MTP layers together with such layers, and its hybrid model has"
_UNPREPARED = "this model's plan for that schedule does not prepare what takes activations out of memory"
_GRAPH, _DISTRIBUTED = "give --cuda-graph-impl transformer_engine, or drop the flag", "give --use-distributed-optimizer"
UNSUPPORTED = (
    Unsupported(
        "--cuda-graph-impl full_iteration",
        "a captured step runs without Python: metrics, loss schedules and token fractions would stand still",
        _GRAPH,
        False,
    ),
    Unsupported(
        "--cuda-graph-impl transformer_engine --mtp-use-repeated-layer",
        "the one captured layer would overwrite at a depth what the backward pass needs of the depth before",
        "drop one of the two",
    ),
    Unsupported(
        "--cuda-graph-impl transformer_engine --hybrid-layer-pattern",
        "Megatron would leave the MTP layers, which are stacks of layers here, out of the graphs without a word",
        "give --cuda-graph-impl local, which records every layer",
    ),
    Unsupported("--use-torch-fsdp2", _SHARDED, _DISTRIBUTED, False),
    Unsupported("--use-megatron-fsdp", _SHARDED, _DISTRIBUTED, False),
    Unsupported("--fp8-output-proj", "the MTP layers' losses multiply with the output layer's weight, and not in FP8"),
    Unsupported(
        "--defer-embedding-wgrad-compute", "what the MTP layers add to the output layer's gradient cannot be put off"
    ),
    Unsupported(
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
        "its schedule would never ask the MTP layers for the weight gradients that they put off",
        "drop --delay-wgrad-compute",
    ),
    Unsupported(
        "--overlap-moe-expert-parallel-comm --fine-grained-activation-offloading",
        _UNPREPARED,
        "drop one of the two",
        False,
    ),
    Unsupported("--overlap-moe-expert-parallel-comm --moe-paged-stash", _UNPREPARED, "drop one of the two", False),
    Unsupported(
        "--experimental-attention-variant gated_delta_net",
        _NO_DEPTHS,
        "give --hybrid-layer-pattern, with G in its place",
    ),
    Unsupported("--experimental-attention-variant dsa", _NO_DEPTHS, "give --hybrid-layer-pattern, with D in its place"),
    Unsupported("--heterogeneous-layers-config-path", _SIZES),
    Unsupported("--heterogeneous-layers-config-encoded-json", _SIZES),
    Unsupported(
        "--hybrid-context-parallel",
        "this script does not cut batches for it",
        "give --context-parallel-size alone, or use Megatron's own script",
        False,
    ),
    Unsupported("--logits-save-dir", "it would save every product of the output layer, those of the MTP layers too"),
    Unsupported("--logits-load-dir", "this script does not train on a teacher's stored logits", depths_alone=False),
    Unsupported("--freeze-all-layers", "this script builds the model without it", "give --mtp-train-only", False),
    Unsupported("--inprocess-restart", "this script does not restart within its process", depths_alone=False),
    Unsupported(
        "--sft",
        "this script reads no such rows",
        "give --chat, which trains on the answers of any chat template",
        False,
    ),
    Unsupported("--fim-data", "this script does not build such data sets", depths_alone=False),
    Unsupported("--log-straggler", "the forward step takes no times for it", depths_alone=False),
)
