"""Tokens and positions (consecutive, then far apart) on which two models are compared, and exact float32 products.

Attention with rotary positions depends only on distances. At the distances of a short prompt, scaled and unscaled
positions differ by less than rounding. So the distances between the last tokens grow up to the model's longest context:
a few tokens cover the whole range of distances. Letters: B batch (1), S positions of the sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf.config import HFConfig

FAR = 16
"""Number of tokens that are far apart."""
LEAST_REACH, MOST_REACH = 2**15, 2**18
"""Bounds of the last position: large enough for every scaling in use, small enough for float32 angles."""


@dataclass(frozen=True)
class Prompt:
    """Tokens of one sequence.

    Attributes:
        tokens_BS: ids [1, S].
        positions_S: rotary positions [S], increasing.
        near: number of tokens at consecutive positions from 0; the others are far apart.
    """

    tokens_BS: Tensor
    positions_S: Tensor
    near: int

    @classmethod
    def of(cls, tokens_BS: Tensor) -> "Prompt":
        """Create a prompt of tokens at consecutive positions."""
        return cls(tokens_BS, torch.arange(tokens_BS.size(1)), tokens_BS.size(1))

    def stretched(self, config: HFConfig, seed: int) -> "Prompt":
        """Return the tokens, followed by random ones at growing distances."""
        far_BS = random_tokens(config, FAR, seed + 1)
        steps_S = torch.linspace(0, 1, FAR + 1)[1:]
        positions_S = (self.near * (reach(config) / self.near) ** steps_S).long()
        positions_S = torch.maximum(positions_S, self.near + torch.arange(FAR))
        return Prompt(torch.cat([self.tokens_BS, far_BS], 1), torch.cat([self.positions_S, positions_S]), self.near)


def random_tokens(config: HFConfig, count: int, seed: int) -> Tensor:
    """Return random ids [1, S] from the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.integer("vocab_size"), (1, count), generator=generator)


def reach(config: HFConfig) -> int:
    """Return the last position: the longest context in the config, within bounds."""
    return min(max(LEAST_REACH, config.integer("max_position_embeddings", default=1)), MOST_REACH)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Turn off TF32 in matrix products and in cuDNN within this context, and restore it afterwards. Also a decorator.

    TF32's 10 bits of mantissa would make comparisons of logits fail. NVIDIA's images set
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which only sets torch's initial state; these settings take precedence.
    """
    products, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")  # also sets torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = cudnn
