"""A runner for a model in training, which drafts with the same parameters that the training updates.

    live = LiveRunner(model, args)      the model of a run, on ranks that share it by tensor parallelism alone
    live.runner()                       ready to draft with the current weights

A runner's attention modules have caches, so they belong to a second model, which shares the run's parameters.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from megatron_mtp.decoding.load import drafting_config
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.model.build import build
from megatron_mtp.model.stored_arguments import alone


class LiveRunner:
    """A second model that shares a run's parameters.

    Args:
        model: model of the run, not wrapped, with MTP layers or a drafter.
        args: arguments of the run.

    Raises:
        ValueError: the run's modules have other names, as Transformer Engine's do, or drafting does not support the
            model.
    """

    def __init__(self, model: Any, args: Namespace) -> None:
        self._of_run = model
        config = drafting_config(alone(args, is_drafter=False), args.params_dtype, "--mtp-draft-prompts: the model")
        config.draft_vocabulary = model.mtp.draft_vocabulary
        config.true_vocab_size = model.mtp_attached.true_vocab_size
        own = build(config)
        self._places = dict(_places(own))  # read before the runner moves recurrent layers to modules with other names
        self._share()
        self._runner = Runner(own)

    def runner(self) -> Runner:
        """Return the runner with the current weights."""
        self._share()
        self._runner.read_weights()
        return self._runner

    def _share(self) -> None:
        """Replace the second model's parameters and buffers by the run's."""
        given = {**dict(self._of_run.named_parameters()), **dict(self._of_run.named_buffers())}
        for name, place in self._places.items():
            key = name.rpartition(".")[2]
            tensor = given.get(name)
            if tensor is None or tensor.shape != place[key].shape:
                raise ValueError(
                    f"--mtp-draft-prompts was given, and the run's model has no '{name}' as drafting does; give "
                    "--transformer-impl local, or drop the flag."
                )
            place[key] = tensor


def _places(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each parameter and buffer, and the dictionary of its module that holds it."""
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            yield from (
                (f"{prefix}.{key}" if prefix else key, held) for key, tensor in held.items() if tensor is not None
            )


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random number generators after this context, so that later draws do not change."""
    tracker = get_cuda_rng_tracker()
    kept: dict[str, Tensor] = tracker.get_states()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            tracker.set_states(kept)
