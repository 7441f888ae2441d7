"""What the published megatron-core wheel needs anywhere, with or without a GPU."""

from megatron.core.datasets import utils as dataset_utils


def install() -> None:
    """Skip the build of the dataset helpers.

    The wheel carries the compiled `helpers_cpp`, but not the Makefile that `compile_helpers` calls, so that the call
    would end the process.
    """
    dataset_utils.compile_helpers = _already_compiled


def _already_compiled() -> None:
    from megatron.core.datasets import helpers_cpp  # noqa: F401  (an ImportError here names what is missing)
