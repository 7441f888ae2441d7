"""Libraries of fused kernels: whether they can be used here, which their being installed does not say."""

import importlib
import sys
from functools import cache


@cache
def why_not(module: str) -> str | None:
    """Why a module cannot be imported; None if it can. A build for another torch or driver fails in ways of its own."""
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            return "it is not installed"
        return f"it cannot be imported: {type(error).__name__}: {error}"[:200]
    return None


def hide_broken_transformer_engine() -> None:
    """Let its import fail in the one way (ImportError) that Megatron takes for absence, whatever the true one is."""
    if why_not("transformer_engine.pytorch") is not None:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # the import system's word for it


def transformer_engine_works() -> bool:
    """Whether Megatron can build its layers with it; they need a CUDA device."""
    from megatron_mtp.platform import cpu

    return not cpu.installed() and why_not("transformer_engine.pytorch") is None


def fuses_weight_gradients() -> bool:
    """Whether Apex's extension is there that adds a weight's gradient to its buffer within the matrix product."""
    return why_not("fused_weight_gradient_mlp_cuda") is None
