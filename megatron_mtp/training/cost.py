"""Costs of a step: wall-clock seconds and bytes of memory, measured without waiting for the device."""

import resource
import statistics
import time

import torch


class StepClock:
    """Seconds of training steps, without the evaluations and checkpoints between them."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._seconds: list[float] = []

    def start(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """The step has ended."""
        if self._began is not None:
            self._seconds.append(time.perf_counter() - self._began)
        self._began = None

    def read(self) -> dict[str, float]:
        """The median since the last call; nothing where no step has ended."""
        seconds, self._seconds = self._seconds, []
        return {"step seconds": statistics.median(seconds)} if seconds else {}


def peak_memory() -> int:
    """The most bytes that this rank has held: tensors on a CUDA device, or else the process."""
    return torch.cuda.max_memory_allocated() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
