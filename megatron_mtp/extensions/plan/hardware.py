"""GPUs: peak speed of matrix products, memory and links.

Matrix products use the dense peaks of the data sheets, without sparsity, in FLOP/s; links count one direction, in
bytes/s. `Reached` has the fraction of each peak that is reached.

    H100, H200  nvidia.com/en-us/data-center/h100, h200: 989 TFLOP/s in BF16 and 1,979 in FP8, 3.35 and 4.8 TB/s,
                NVLink 900 GB/s in both directions; 400 Gb/s InfiniBand a GPU (DGX H100)
    B200        docs.nvidia.com, DGX B200: 2,250 and 4,500 TFLOP/s, 180 GB, 8 TB/s, NVLink 1.8 TB/s in both directions
    MI300X      amd.com, Instinct MI300X data sheet: 1,307.4 and 2,614.9 TFLOP/s, 192 GB, 5.3 TB/s, seven Infinity
                Fabric links of 64 GB/s in one direction
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Reached:
    """Fractions of the peaks that kernels reach, and the number of passes over activations.

    `head` was measured on an H200 (docs/explanation/evidence_gpu.md): 3 products of an output layer with 131,072 rows
    take 54.6 ms, of which 2.7 ms are reads and writes of logits. Other products are assumed to be as efficient. The
    rest are assumptions: products of experts are smaller, and published speeds of Qwen3-235B are low; FlashAttention-3
    reaches half of the peak with causal masks (arXiv:2407.08608); collectives reach three quarters.

    Attributes:
        products, head, experts, attention: fractions of the peak FLOP/s.
        copies, links: fractions of the peak memory and link bandwidth.
        passes: reads and writes of each saved activation in a forward pass; a backward pass has twice as many.
    """

    products: float = 0.52
    head: float = 0.52
    experts: float = 0.2
    attention: float = 0.45
    copies: float = 0.8
    links: float = 0.75
    passes: float = 3.0


@dataclass(frozen=True)
class Card:
    """A GPU of a cluster.

    Attributes:
        bf16, fp8: FLOP/s of matrix products.
        memory: memory in bytes.
        bandwidth: memory bandwidth in bytes/s.
        link: bytes/s to another GPU of the node, in one direction.
        network: bytes/s to another node, in one direction.
        node: GPUs per node.
    """

    name: str
    bf16: float
    fp8: float
    memory: float
    bandwidth: float
    link: float
    network: float
    node: int = 8
    reached: Reached = field(default_factory=Reached)


CARDS = {
    "H100": Card("H100", 989e12, 1979e12, 80e9, 3.35e12, 450e9, 50e9),
    "H200": Card("H200", 989e12, 1979e12, 141e9, 4.8e12, 450e9, 50e9),
    "B200": Card("B200", 2250e12, 4500e12, 180e9, 8e12, 900e9, 50e9),
    "MI300X": Card("MI300X", 1307.4e12, 2614.9e12, 192e9, 5.3e12, 448e9, 50e9),
}

UNITS = {"bf16": 1e12, "fp8": 1e12, "memory": 1e9, "bandwidth": 1e9, "link": 1e9, "network": 1e9, "node": 1}
"""Units of custom figures: TFLOP/s, GB, GB/s, GPUs."""
PARTS = tuple(one.name for one in fields(Reached))


def card_of(words: str) -> Card:
    """Parse `--gpu`: a name in the table, custom figures, or both, such as H100,network=25,products=0.6.

    Raises:
        ValueError: a name or a figure is unknown, or figures are missing.
    """
    name, *changes = words.split(",")
    if "=" in name:
        name, changes = "", [name, *changes]
    if name and name not in CARDS:
        raise ValueError(f"--gpu is '{name:.40}'; give {', '.join(CARDS)}, or figures such as {_example()}.")
    given = dict(_figure(change) for change in changes)
    missing = set() if name else UNITS.keys() - given.keys() - {"node", "fp8"}
    if missing:
        raise ValueError(f"--gpu lacks {', '.join(sorted(missing))}; give all, such as {_example()}.")
    of_card: dict[str, Any] = {key: value * UNITS[key] for key, value in given.items() if key in UNITS}
    if "node" in of_card:
        of_card["node"] = int(of_card["node"])
    parts = {key: value for key, value in given.items() if key in PARTS}
    whole: dict[str, Any] = of_card if name else {"fp8": of_card["bf16"]} | of_card
    card = replace(CARDS[name], **whole) if name else Card("own", **whole)
    return replace(card, reached=replace(card.reached, **parts))


def _example() -> str:
    return "bf16=300,memory=64,bandwidth=1600,link=200,network=25 (TFLOP/s, GB, GB/s)"


def _figure(change: str) -> tuple[str, float]:
    key, _, text = change.partition("=")
    if key not in UNITS and key not in PARTS:
        raise ValueError(f"--gpu has '{change:.40}'; figures are {', '.join((*UNITS, *PARTS))}.")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ValueError(f"--gpu has '{change:.40}'; give {key} a number above 0.")
    return key, value
