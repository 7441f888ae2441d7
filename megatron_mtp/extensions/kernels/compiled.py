"""Compile the kernels of every loss for a card that is not here, with the calls that launch them.

The calls are those of a training step (`triton_chunk.losses_`), with tensors on torch's device `meta`, which have sizes
but no memory. So constants, dtypes and alignments are those of a real launch. Triton compiles instead of launching, and
keeps the result in its own cache.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from megatron_mtp.extensions.kernels.cards import CARDS, H200
from megatron_mtp.losses import triton_chunk, triton_kernels
from megatron_mtp.losses.table import LOSSES, depth_loss
from megatron_mtp.losses.token_loss import TokenLoss
from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.model.vocabulary import Vocabulary
from megatron_mtp.spec.config import MTPConfig

TOKENS, ENTRIES = 16_384, 131_072
"""Rows and vocabulary entries: the sizes measured on the H200 in docs/explanation/evidence_gpu.md."""
DRAFTED = ENTRIES // 4
"""Entries of a draft vocabulary; the kernels read the trunk's logits through an index."""
INSTRUCTION = 16
"""Bytes of an instruction."""
WORDS = {"DIVERGES": "with kd", "GATHERED": "of drafted tokens"}
"""Words for constants that are true, as they appear in the name of a kernel."""


@dataclass(frozen=True)
class Kernel:
    """A kernel as compiled for one compute capability.

    Attributes:
        name: of the function, and of the constants that make it another one.
        target: the compute capability.
        block: logits of a row that a program has in registers at once; None without rows.
        warps: of a program.
        registers: of a thread.
        spilled: bytes of a thread that did not fit into them.
        shared: bytes of a program.
        moved: bytes that it reads and writes for each logit.
        instructions: of the loop over a row's blocks, for each logit; None but of an H200's kernels with rows.
    """

    name: str
    target: int
    block: int | None
    warps: int
    registers: int
    spilled: int
    shared: int
    moved: int
    instructions: float | None

    @property
    def occupancy(self) -> float:
        """Fraction of a multiprocessor's maximum number of warps that is resident."""
        return self._resident[0]

    @property
    def limit(self) -> str:
        """What limits the occupancy."""
        return self._resident[1]

    @property
    def _resident(self) -> tuple[float, str]:
        return CARDS[self.target].occupancy(self.registers, self.shared, self.warps)


def names() -> list[str]:
    """Return the losses that have kernels."""
    return [name for name, loss in LOSSES.items() if loss in triton_chunk.KERNELS]


def kernels(target: int, losses: Sequence[str], drafted: bool = True) -> list[Kernel]:
    """Return the kernels that the losses launch, each once, and the trial kernel.

    Args:
        target: a compute capability of `CARDS`.
        losses: names of the losses.
        drafted: whether to include those for a draft vocabulary.
    """
    launched = [trial(target)]
    for entries in (ENTRIES, DRAFTED) if drafted else (ENTRIES,):
        launched += [kernel for name in losses for kernel in launches(target, name, entries)]
    found = dict[str, Kernel]()
    for kernel in launched:
        found.setdefault(kernel.name, kernel)
    return [*found.values()]


def launches(target: int, name: str, entries: int = ENTRIES) -> list[Kernel]:
    """Return what a loss launches for `TOKENS` rows, in order; fewer entries than `ENTRIES` mean a draft vocabulary."""
    loss = loss_of(name)
    with _compiling(target) as compiled:
        triton_chunk.losses_(loss, _products(loss, entries))
    return [_kernel(target, each) for each in compiled]


def trial(target: int) -> Kernel:
    """Return the kernel that tests whether kernels run at all."""
    with _compiling(target) as compiled:
        triton_kernels.trial[(1,)](torch.empty(1, device="meta"))
    return _kernel(target, compiled[0])


def loss_of(name: str) -> TokenLoss:
    """Return the loss with this name and its usual settings."""
    return depth_loss(MTPConfig(mtp_loss=name))


def _products(loss: TokenLoss, entries: int) -> triton_chunk.Products:
    """Return one depth's chunk of all rows; the trunk's logits are of drafted tokens, or of all, as the loss needs."""
    new = partial(torch.empty, device="meta")
    drafts = None
    if entries < ENTRIES:
        drafts = DraftVocabulary(torch.arange(entries), ENTRIES).to("meta")
    taught = ENTRIES if loss.needs_whole_teacher else entries
    return triton_chunk.Products(
        products_NV=new(TOKENS, entries, dtype=torch.bfloat16),
        labels_N=new(TOKENS, dtype=torch.int64),
        mask_N=new(TOKENS),
        scale_D=new(1),
        teacher_TW=new(TOKENS, taught, dtype=torch.bfloat16) if loss.needs_teacher else None,
        taught_N=new(TOKENS, dtype=torch.int64) if loss.needs_teacher else None,
        vocabulary=Vocabulary(entries, draft_vocabulary=drafts),
    )


class _AbsentDriver:
    """Driver for a GPU that is absent: answers Triton's questions before it compiles."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_device(self) -> int:
        """Return the number under which Triton caches compiled kernels."""
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)


class _Noted:
    """Kernel that is compiled and recorded instead of launched."""

    def __init__(self, kernel: JITFunction, compiled: list[Any]) -> None:
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.compiled.append(self.kernel.warmup(*arguments, grid=grid, **constants))

        return launch


@contextmanager
def _compiling(target: int) -> Iterator[list[Any]]:
    """Within the context, compile launches of the losses' kernels for the target, and add the results to the list."""
    launched = {
        name: kernel
        for name, kernel in vars(triton_kernels).items()
        if isinstance(kernel, JITFunction) and not name.startswith("_")  # the others are called by these
    }
    compiled = list[Any]()
    driver.set_active(_AbsentDriver(target))
    try:
        for name, kernel in launched.items():
            setattr(triton_kernels, name, _Noted(kernel, compiled))
        yield compiled
    finally:
        for name, kernel in launched.items():
            setattr(triton_kernels, name, kernel)
        driver.set_active(None)  # Triton finds its driver again when needed


def _kernel(target: int, compiled: Any) -> Kernel:
    parameters = compiled.src.fn.arg_names
    constants = {parameters[place]: value for (place,), value in compiled.src.constants.items()}
    block, warps, cubin = constants.get("BLOCK"), compiled.metadata.num_warps, compiled.asm["cubin"]
    registers, spilled = _registers(cubin)
    return Kernel(
        ", ".join([compiled.name, *(words for constant, words in WORDS.items() if constants.get(constant))]),
        target,
        block,
        warps,
        registers,
        spilled,
        compiled.metadata.shared,
        _moved(compiled.asm["ttir"]),
        _loop(cubin) * warps * 32 / block if target == H200 and block is not None else None,
    )


@cache
def _registers(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread, and bytes of local memory, which hold spilled registers."""
    told = _dumped(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


@cache
def _loop(cubin: bytes) -> int:
    """Return the number of instructions of the longest backward jump."""
    back = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@\S+ )?BRA\b[^;]* 0x([0-9a-f]+) *;", _dumped(cubin, "--dump-sass"))
    return max(int(here, 16) - int(target, 16) for here, target in back) // INSTRUCTION + 1


def _dumped(cubin: bytes, what: str) -> str:
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def _moved(ttir: str) -> int:
    """Return bytes moved per logit: every load and every store of a block is one pass over the row."""
    bits = re.findall(r"tt\.(?:load|store) .*: tensor<\d+x!tt\.ptr<[a-z]+(\d+)>", ttir)
    return sum(map(int, bits)) // 8
