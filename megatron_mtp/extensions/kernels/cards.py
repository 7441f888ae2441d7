"""What a multiprocessor holds, by compute capability, how fast a card of it is, and how many warps it keeps resident.

Limits are those of the table "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++ Programming Guide.
Peaks are those of the data sheets: dense products in BF16 with sums in float32, float32 without tensor cores, memory.

    A100      nvidia.com, A100 80GB SXM data sheet: 312 and 19.5 TFLOP/s, 2,039 GB/s
    L40S      nvidia.com, L40S data sheet: 362 and 91.6 TFLOP/s, 864 GB/s
    H200      nvidia.com/en-us/data-center/h200: 989 and 67 TFLOP/s, 4.8 TB/s
    B200      nvidia.com/en-us/data-center/hgx, an eighth of HGX B200: 2,250 and 75 TFLOP/s, 8 TB/s
    B300      likewise of HGX B300
    RTX 5090  NVIDIA RTX Blackwell GPU Architecture, appendix A: 209.5 and 104.8 TFLOP/s, 1,792 GB/s
"""

from dataclasses import dataclass

REGISTERS = 65_536
"""Registers of a multiprocessor. Each of its four schedulers has a quarter, and gives multiples of 256 to a warp."""
SCHEDULERS, REGISTER_UNIT = 4, 256
RESERVED, SHARED_UNIT = 1024, 128
"""Bytes of shared memory that the driver adds to a program's, and the unit to which it rounds the sum up."""


@dataclass(frozen=True)
class Card:
    """A card, and what one of its multiprocessors holds.

    Attributes:
        warps: the most that are resident. The limit of programs is half of it, and a program has two warps at least.
        shared: bytes of shared memory.
        bf16, float32: FLOP/s of products, and without tensor cores.
        bandwidth: bytes/s of memory.
    """

    name: str
    warps: int
    shared: int
    bf16: float
    float32: float
    bandwidth: float

    def occupancy(self, registers: int, shared: int, warps: int) -> tuple[float, str]:
        """The share of the most warps that are resident, and what limits it.

        Args:
            registers: of a thread.
            shared: bytes of a program.
            warps: of a program.
        """
        of_warp = _rounded(32 * registers, REGISTER_UNIT)
        limits = {
            "warps": self.warps // warps,
            "registers": REGISTERS // SCHEDULERS // of_warp * SCHEDULERS // warps,
            "shared memory": self.shared // _rounded(shared + RESERVED, SHARED_UNIT),
        }
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit] * warps / self.warps, limit


def _rounded(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit


KIB = 1024
CARDS = {
    80: Card("A100", 64, 164 * KIB, 312e12, 19.5e12, 2.039e12),
    89: Card("L40S", 48, 100 * KIB, 362e12, 91.6e12, 0.864e12),
    90: Card("H200", 64, 228 * KIB, 989e12, 67e12, 4.8e12),
    100: Card("B200", 64, 228 * KIB, 2250e12, 75e12, 8e12),
    103: Card("B300", 64, 228 * KIB, 2250e12, 75e12, 8e12),
    120: Card("RTX 5090", 48, 100 * KIB, 209.5e12, 104.8e12, 1.792e12),
}
"""GPUs by compute capability."""
H200 = 90
"""The GPU that was measured, docs/explanation/evidence_gpu.md."""
