"""Parts of gpu_check.py that need a CUDA device. Each runs in a fork of a process that has imported everything.

run.py          a run: the fork servers, the parts together or alone, and the events
lines.py        the fork servers: Megatron over gloo, with its own modules, with Transformer Engine's
worker.py       the fork of one part
part.py         a part's inputs and results, and how it starts commands
record.py       the JSON file of one part
page.py         docs/explanation/evidence_gpu.md from the files of several runs
issue.py        final output of a run, to paste into an issue
losses.py       losses against float64, their memory and time
replays.py      sampled and other steps as CUDA graphs
drafting.py     plain decoding against drafting: CUDA graphs, compiled or not, cuDNN attention, energy, a profile
divergence.py   how often drafted outputs diverge from plain ones in bfloat16
training.py     training compared with the CPU: MTP layers, losses, FP8, experts, drafters; cost against Megatron's MTP
serving.py      outputs of a drafting server
suite.py        unit tests

`PARTS` is the table. Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

PACKAGES = {"transformer_engine.pytorch": "transformer-engine"}
"""Distribution names that differ from the module names."""


@dataclass(frozen=True)
class Part:
    """A row.

    Attributes:
        function: `module:function` of this package, from a `Setting` to what it `Found`.
        seconds: time limit.
        given: additional arguments of the function.
        line: the process it is forked from, in `lines.LINES`; on a CPU all are one.
        alone: it is timed, so nothing runs at the same time.
        needs: modules that it requires.
        only_cuda: it shows nothing on a CPU.
        short: time limit in a short run; 0 if it is not part of one.
    """

    function: str
    seconds: float
    given: Mapping[str, Any] = field(default_factory=dict)
    line: str = "local"
    alone: bool = False
    needs: tuple[str, ...] = ()
    only_cuda: bool = False
    short: float = 0.0

    def limit(self, short: bool) -> float:
        """Return the time limit in seconds, in a short run or a whole one."""
        return self.short if short else self.seconds

    def missing(self, on_cpu: bool) -> str | None:
        """Return why it cannot run in this process; None if it can."""
        from megatron_mtp.megatron.machine import why_not

        if on_cpu and self.only_cuda:
            return "needs a CUDA device"
        return next((f"needs {PACKAGES.get(one, one)}: {why}" for one in self.needs if (why := why_not(one))), None)


_te = partial(Part, line="te", needs=("transformer_engine.pytorch",), only_cuda=True)
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type alltoall"
)
_FUSED = "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_EAGLE3 = "--drafter eagle3 --drafter-steps 3 --drafter-layers 1 2 3"
_DFLASH = "--drafter dflash --drafter-steps 3 --drafter-num-layers 2 --drafter-blocks 9"
_STEPS = {
    "script": "train_step.py",
    "flags": "--depths 1 2 --repeats 15",
    "short": "--depths 1 --repeats 5",
    "quick": "--depths 1",
}
_FIRST = _STEPS | {"flags": "--depths 1 2 --repeats 1", "short": "--depths 1 --repeats 1"}
_MEMORY = {
    "script": "mtp_memory.py",
    "flags": "--vocab-sizes 131072 --tokens 1024 8192 --repeats 3",
    "quick": "--tokens 16 128",
}
_GRAPHED = "--cuda-graph-impl local --te-rng-tracker"
_PARITY, _FP8 = "benchmarks.gpu.training:parity", "benchmarks.gpu.training:eight_bits"
_BENCHMARK, _FIRST_STEP = "benchmarks.gpu.training:benchmark", "benchmarks.gpu.training:first_step"
_TRUNK = {"depths": 0, "flags": "--num-layers 4"}
_UNIT = {
    "losses": "losses_table linear_cross_entropy triton_chunk weight_gradient float32_logits",
    "megatron": "objective mtp_parity mtp_loss trained_stage mixing unroll depths draft_vocabulary",
    "modules": "shift packed portable portable_attention rope latent eagle3 block_drafter",
    "decoding": "sampling drafting verifiers batch weight_updates",
    "layers": "cached_attention dense_layer experts recurrent_layers latent_attention",
    "graphs": "drafting_trees graphs drafting_methods",
}

SHORT = 235.0
"""Seconds of a short run, including first imports from a cold disk, which take up to 110."""

PARTS = {
    "parity_2": Part(_PARITY, 150, {"depths": 2}, short=60),
    "te_parity_2": _te(_PARITY, 150, {"depths": 2}),
    "first_step": Part(_FIRST_STEP, 150, _FIRST, short=60),
    "te_first_step": _te(_FIRST_STEP, 150, _FIRST),
    "fp8_delayed": _te(_FP8, 150, {"recipe": "delayed", "form": "hybrid"}),
    "fp8_blockwise": _te(_FP8, 150, {"recipe": "blockwise", "form": "e4m3"}),
    "fp8_tensorwise": _te(_FP8, 150, {"recipe": "tensorwise", "form": "hybrid"}),
    "parity_1": Part(_PARITY, 150, {"depths": 1}),
    "te_parity_1": _te(_PARITY, 150, {"depths": 1}),
    "packed": Part(_PARITY, 150, {"flags": "--dataloader-inter-document-masking"}, "te"),
    "experts": Part(_PARITY, 150, {"flags": _EXPERTS}, "te"),
    "fused_experts": _te(_PARITY, 150, {"flags": _EXPERTS, "device_flags": _FUSED}),
    "recompute": Part(_PARITY, 150, {"flags": _RECOMPUTED}, "te"),
    "train_graphs": _te(_PARITY, 150, {"device_flags": _GRAPHED}),
    "kd": Part(_PARITY, 150, {"flags": "--mtp-loss kd"}, "te"),
    "eagle3": Part(_PARITY, 150, _TRUNK | {"drafter": _EAGLE3}, "te"),
    "dflash": Part(_PARITY, 150, _TRUNK | {"drafter": _DFLASH}, "te"),
    "replays": Part("benchmarks.gpu.replays:replays", 120),
    "expert_replays": Part("benchmarks.gpu.replays:expert_replays", 150, {"flags": _EXPERTS}, "te"),
    "serve": Part("benchmarks.gpu.serving:serve", 120, {}, "te"),
    **{
        f"unit_{n}": Part("benchmarks.gpu.suite:unit_tests", 240, {"names": _UNIT[n]}, needs=("pytest",)) for n in _UNIT
    },
    "unit_engine": Part(
        "benchmarks.gpu.suite:unit_tests", 240, {"names": "auto_count engine"}, needs=("pytest", "hypothesis")
    ),
    "divergence": Part("benchmarks.gpu.divergence:divergence", 200),
    "train_step": Part(_BENCHMARK, 120, _STEPS, alone=True, short=60),
    "te_train_step": _te(_BENCHMARK, 120, _STEPS, alone=True),
    "losses": Part("benchmarks.gpu.losses:losses", 60, alone=True),
    "mtp_memory": Part(_BENCHMARK, 120, _MEMORY, alone=True),
    "fused": Part("benchmarks.gpu.drafting:fused", 90, alone=True, only_cuda=True),
    "profile": Part("benchmarks.gpu.drafting:profiled", 60, alone=True),
    "graphs": Part("benchmarks.gpu.drafting:graphs", 90, alone=True),
    "energy": Part("benchmarks.gpu.drafting:energy", 60, alone=True, needs=("zeus",), only_cuda=True),
    "cudnn": Part("benchmarks.gpu.drafting:cudnn", 60, alone=True, only_cuda=True),
}
"""Small correctness checks first, then timed parts; the most informative first."""
