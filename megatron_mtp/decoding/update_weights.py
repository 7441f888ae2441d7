"""Weight updates of a running engine. No sequence mixes tokens, keys or values of two versions."""

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from megatron_mtp.checkpoint.convert.live import load_hf_weights
from megatron_mtp.checkpoint.convert.live_drafter import load_drafter_weights
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.requests import Finish, Update

RUNNING = ("finish", "restart", "abort")
"""What happens to running requests."""


def update_weights(
    engine: Engine,
    weights: Iterable[tuple[str, Tensor]],
    running: str = "finish",
    like: Path | None = None,
    version: int | None = None,
    drafter: Iterable[tuple[str, Tensor]] | None = None,
    emit: Callable[[list[Update]], object] | None = None,
) -> list[Update]:
    """Load new weights into an engine's model. Waiting requests start with them; the prefix cache is cleared.

    All tensor-parallel ranks must call this, with the same requests.

    Args:
        engine: the engine.
        weights: names and tensors in the model's Hugging Face format, all or some (`export_hf_weights`).
        running: 'finish' first completes running requests with the old weights; 'abort' ends them with the tokens that
            they have; 'restart' recomputes them, and their earlier tokens become void, as the version of their next
            updates shows.
        like: folder whose names the weights have; None for those of an export of the loaded checkpoint.
        version: new `policy_version`; None for the last one plus one.
        drafter: names and tensors of its drafter, all or some (`export_drafter_weights`); None to keep the drafter.
        emit: called with the updates of each step as they arrive; it may cancel requests.

    Returns:
        Updates of the requests that finished or were aborted.

    Raises:
        ValueError: an unknown choice, or a tensor that does not belong to this model. In the latter case the engine
            runs no step until an update succeeds.
    """
    if running not in RUNNING:
        raise ValueError(f"running is '{running}'; give {' or '.join(RUNNING)}.")
    updates: list[Update] = []
    engine.scheduler.closing = True
    try:
        while running != "restart" and engine.scheduler.begun:
            news = engine.step() if running == "finish" else _abort(engine)
            updates += news
            if emit is not None:
                emit(news)
    finally:
        engine.scheduler.closing = False
    engine.scheduler.restart()
    engine.is_torn = True
    load_hf_weights(engine.runner.model, weights, engine.runner.source, like)
    if drafter is not None:
        load_drafter_weights(engine.runner.model, drafter)
    engine.runner.read_weights()
    engine.runner.alarm.reset()
    engine.is_torn = False
    engine.policy_version = engine.policy_version + 1 if version is None else version
    return updates


def _abort(engine: Engine) -> list[Update]:
    """End all sequences that have started; waiting sequences are not affected."""
    begun, version = [seq.number for seq in engine.scheduler.begun], engine.policy_version
    for number in begun:
        engine.cancel(number)
    return [Update(number, [], finish=Finish.ABORT, policy_version=version) for number in begun]
