"""Energy of a stretch of work, by the machine's own counters: NVML on a GPU, RAPL on a CPU that shows it."""

from pathlib import Path
from typing import Any

import torch

from megatron_mtp.platform import cpu

RAPL = Path("/sys/class/powercap")


class Meter:
    """Starts when made.

    Attributes:
        why: the reason that there are no joules; None where there is a meter.
    """

    def __init__(self, powercap: Path = RAPL) -> None:
        self._rapl = [zone / "energy_uj" for zone in sorted(powercap.glob("*-rapl:?")) if _readable(zone / "energy_uj")]
        self._nvml = _nvml()
        self.why = None if self._nvml or self._rapl else "no NVML (nvidia-ml-py), and no readable RAPL counter"
        self._start = self._read()

    def joules(self) -> float | None:
        """Since the start; a counter of RAPL that has wrapped around is taken to have done so once."""
        if self.why is not None:
            return None
        return sum(
            (now - then) if now >= then else now + _range(zone) - then
            for now, then, zone in zip(self._read(), self._start, [*self._rapl, None], strict=False)
        )

    def _read(self) -> list[float]:
        if self._nvml is not None:
            library, handle = self._nvml
            return [library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3]
        return [int(counter.read_text()) / 1e6 for counter in self._rapl]


def _range(counter: Path | None) -> float:
    return 0.0 if counter is None else int(counter.with_name("max_energy_range_uj").read_text()) / 1e6


def _readable(counter: Path) -> bool:
    try:
        return counter.read_text().strip().isdigit()
    except OSError:
        return False


def _nvml() -> tuple[Any, Any] | None:
    """The library and this process's device, where both are there; NVML ignores CUDA_VISIBLE_DEVICES."""
    if cpu.installed():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # the library and its driver are optional, and each has errors of its own
        return None
