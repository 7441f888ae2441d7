"""Weight updates of a serving engine. Clients get everything the update ends, and no sent tokens become void.

    trainer's thread    update_weights -----------------------------------------------> policy_version
    engine's thread     step, step | the running requests end | new weights | step, step

Separate from `async_engine.py`, because it imports the converters, which `serve` does not need.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_mtp.decoding import update_weights as decoding
from megatron_mtp.server.async_engine import AsyncEngine

RUNNING = ("finish", "abort")
"""What happens to running requests: tokens that were sent cannot be taken back, so requests never restart."""


def update_weights(
    service: AsyncEngine,
    weights: Iterable[tuple[str, Tensor]],
    running: str = "finish",
    like: Path | None = None,
    version: int | None = None,
) -> int:
    """Load new weights into a server's model between two steps, and wait. Do not call this on the event loop.

    Running requests end first, normally or with the tokens that they have; clients receive them as usual, with the
    version that generated them. Waiting and new requests start with the new weights. If an update fails halfway,
    requests wait for one that succeeds.

    Args:
        service: the server's engine.
        weights, like, version: as in `decoding.update_weights`; the weights are read on the engine's thread.
        running: 'finish' or 'abort', which is the finish reason of the aborted choices.

    Returns:
        The new `policy_version`.

    Raises:
        ValueError: another choice, several ranks, or a tensor that does not belong to this model.
        RuntimeError: the engine has failed or ended.
    """
    if running not in RUNNING:
        raise ValueError(f"running is '{running}'; give {' or '.join(RUNNING)} for an engine that serves.")
    update = partial(decoding.update_weights, weights=weights, running=running, like=like, version=version)
    return service.between_steps(lambda engine, emit: (update(engine, emit=emit), engine.policy_version)[1])
