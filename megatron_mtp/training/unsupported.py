"""Features of Megatron that a run cannot have: one table of flags, each with its reason and what to give instead.

docs/layouts.md shows the rows beside features that work and features that nobody has tried (both are in
tests/functional/features.py): tests/unit/test_unsupported.py compares the page with the tables.
"""

import re
from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Unsupported:
    """A row.

    Attributes:
        flags: as a command line has them; the row is about runs with all of them.
        because: what would go wrong, as a clause.
        instead: what to do.
        depths_alone: only runs with depths cannot have it.
    """

    flags: str
    because: str
    instead: str = "drop the flag"
    depths_alone: bool = False

    def is_given(self, args: Namespace) -> bool:
        """Whether all flags were given, with these values where they have some."""
        given = re.findall(r"--(\S+)(?: (\w\S*))?", self.flags)
        return all(_has(args, name.replace("-", "_"), value) for name, value in given)

    def sentence(self) -> str:
        """The refusal."""
        beside = " with --mtp-num-layers" if self.depths_alone else ""
        return f"{self.flags} was given{beside}, but {self.because}; {self.instead}."


def check_supported(args: Namespace) -> None:
    """Raises ValueError at the first feature that this run cannot have."""
    for row in UNSUPPORTED:
        if (args.mtp_num_layers is not None or not row.depths_alone) and row.is_given(args):
            raise ValueError(row.sentence())


def _has(args: Namespace, name: str, value: str) -> bool:
    found = getattr(args, name, None)
    return str(found) == value if value else bool(found)


_SHARDED = "the losses read the output layer's weight, which it gathers in that layer's own forward alone"

UNSUPPORTED = (
    Unsupported(
        "--cuda-graph-impl full_iteration",
        "a captured step runs without Python: metrics, loss schedules and token fractions would stand still",
        "give --cuda-graph-impl transformer_engine, or drop the flag",
    ),
    Unsupported(
        "--cuda-graph-impl transformer_engine --mtp-use-repeated-layer",
        "the one captured layer would overwrite at a depth what the backward pass needs of the depth before",
        "drop one of the two",
        depths_alone=True,
    ),
    Unsupported("--use-torch-fsdp2", _SHARDED, "give --use-distributed-optimizer"),
    Unsupported("--use-megatron-fsdp", _SHARDED, "give --use-distributed-optimizer"),
    Unsupported("--init-model-with-meta-device", "FSDP alone fills such weights, and it is refused as well"),
    Unsupported(
        "--fp8-output-proj",
        "the depths' losses multiply with the output layer's weight themselves, and not in FP8",
        depths_alone=True,
    ),
    Unsupported(
        "--defer-embedding-wgrad-compute",
        "what the depths add to the output layer's gradient cannot be put off",
        depths_alone=True,
    ),
    Unsupported("--overlap-moe-expert-parallel-comm", "its schedule does not know these depths", depths_alone=True),
    Unsupported(
        "--delay-wgrad-compute",
        "it goes with --overlap-moe-expert-parallel-comm alone, whose schedule does not know these depths",
        depths_alone=True,
    ),
    Unsupported(
        "--heterogeneous-layers-config-path",
        "a depth repeats the trunk's last layer, and here every layer has sizes of its own",
        depths_alone=True,
    ),
    Unsupported(
        "--heterogeneous-layers-config-encoded-json",
        "a depth repeats the trunk's last layer, and here every layer has sizes of its own",
        depths_alone=True,
    ),
    Unsupported(
        "--hybrid-context-parallel",
        "this script does not cut batches for it",
        "give --context-parallel-size alone, or use Megatron's own script",
    ),
    Unsupported(
        "--logits-save-dir",
        "it would save every product of the output layer, those of the depths too",
        depths_alone=True,
    ),
    Unsupported(
        "--logits-load-dir",
        "training on a teacher's stored logits is left to Megatron's own script",
        "drop the flag, or use that script",
    ),
    Unsupported("--perform-rl-step", "this script trains on texts alone", "use Megatron's train_rl.py"),
    Unsupported(
        "--freeze-all-layers", "this script builds the model without it", "give --mtp-train-only, or drop the flag"
    ),
    Unsupported("--inprocess-restart", "this script does not restart within its process"),
    Unsupported("--log-straggler", "the forward step takes no times for it"),
)
