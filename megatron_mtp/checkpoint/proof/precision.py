"""Float32 products in float32: comparisons of logits would fail by TF32's 10 bits of mantissa.

NVIDIA's images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which only chooses what torch starts with; these settings win.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32() -> Iterator[None]:
    """Without TF32 inside, in matrix products and in cuDNN; as it was afterwards. Also a decorator."""
    products, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")  # sets torch.backends.cuda.matmul.allow_tf32 as well
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = cudnn
