"""The parts of gpu_check.py: what only a CUDA device can show. Each runs as a process of its own.

part.py         what a part is given and returns, and how it runs commands
worker.py       the process of one part
record.py       the JSON file of one part
page.py         docs/gpu.md from the files of several runs
losses.py       losses against float64, their memory and time
drafting.py     plain decoding against drafting: CUDA graphs, compiled or not, cuDNN attention, energy, a profile
divergence.py   how often drafted texts part from plain ones in bfloat16
training.py     parity with the CPU and with TE, FP8, MoE with TE; steps and memory against Megatron's own MTP
suite.py        the unit tests, and parity with Megatron's own MTP

`PARTS` is the table. Nothing here imports torch.
"""

from dataclasses import dataclass
from importlib.util import find_spec

PACKAGES = {"xdist": "pytest-xdist", "transformer_engine": "transformer-engine"}
"""Names of distributions, where modules are called otherwise."""


@dataclass(frozen=True)
class Part:
    """A row.

    Attributes:
        function: `module:function`, from a `Setting` to what it `Found`.
        needs: modules without which it does not run.
        only_cuda: it shows nothing on a CPU.
    """

    function: str
    needs: tuple[str, ...] = ()
    only_cuda: bool = False

    def missing(self, on_cpu: bool) -> str | None:
        """Why it cannot run here; None if it can."""
        if on_cpu and self.only_cuda:
            return "needs a CUDA device"
        absent = [PACKAGES.get(name, name) for name in self.needs if find_spec(name) is None]
        return f"needs {', '.join(absent)}" if absent else None


_RUN = ("tqdm", "psutil", "tensorboard")
_TESTS = (*_RUN, "pytest", "hypothesis")
_TE = (*_RUN, "transformer_engine")

PARTS = {
    "losses": Part("benchmarks.gpu.losses:losses"),
    "graphs": Part("benchmarks.gpu.drafting:graphs"),
    "fused": Part("benchmarks.gpu.drafting:fused", only_cuda=True),
    "cudnn": Part("benchmarks.gpu.drafting:cudnn", only_cuda=True),
    "megatron_parity": Part("benchmarks.gpu.suite:megatron_parity", _TESTS),
    "parity": Part("benchmarks.gpu.training:parity", _RUN),
    "unit_tests": Part("benchmarks.gpu.suite:unit_tests", _TESTS),
    "train_step": Part("benchmarks.gpu.training:train_step", _RUN),
    "mtp_memory": Part("benchmarks.gpu.training:mtp_memory", _RUN),
    "divergence": Part("benchmarks.gpu.divergence:divergence", _RUN),
    "energy": Part("benchmarks.gpu.drafting:energy", ("zeus",), only_cuda=True),
    "profile": Part("benchmarks.gpu.drafting:profiled"),
    "te_parity": Part("benchmarks.gpu.training:te_parity", _TE, only_cuda=True),
    "te_fp8": Part("benchmarks.gpu.training:te_fp8", _TE, only_cuda=True),
    "te_moe": Part("benchmarks.gpu.training:te_moe", _TE, only_cuda=True),
}
"""In the order in which they run: the most telling first."""
