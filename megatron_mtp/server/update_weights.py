"""New weights for an engine that serves: clients get what the update ends, and nobody's tokens become void.

    trainer's thread    update_weights -----------------------------------------------> policy_version
    engine's thread     step, step | the running requests end | new weights | step, step

Apart from `async_engine.py`, since it takes the converters, which `serve` does not need.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_mtp.decoding import update_weights as decoding
from megatron_mtp.server.async_engine import AsyncEngine

RUNNING = ("finish", "abort")
"""What becomes of running requests: tokens that went out cannot be taken back, so they never restart."""


def update_weights(
    service: AsyncEngine,
    weights: Iterable[tuple[str, Tensor]],
    running: str = "finish",
    like: Path | None = None,
    version: int | None = None,
) -> int:
    """Give the model of a server new weights between two steps; any thread but the event loop's may call it, and waits.

    Requests that run end first, or with the tokens that they have; clients get them as ever, with the version that made
    them. Requests that wait, or come meanwhile, begin with the new weights. Where an update fails half-way, requests
    wait for one that succeeds.

    Args:
        service: the server's engine.
        weights, like, version: as of `decoding.update_weights`; the weights are read on the engine's thread.
        running: 'finish' or 'abort', the finish reason of these requests' choices.

    Returns:
        The new `policy_version`.

    Raises:
        ValueError: another choice, several ranks, or a tensor that is not of this model.
        RuntimeError: the engine has failed or ended.
    """
    if running not in RUNNING:
        raise ValueError(f"running is '{running}'; give {' or '.join(RUNNING)} for an engine that serves.")
    update = partial(decoding.update_weights, weights=weights, running=running, like=like, version=version)
    return service.between_steps(lambda engine, emit: (update(engine, emit=emit), engine.policy_version)[1])
