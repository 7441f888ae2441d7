"""New weights for a running engine: no sequence has tokens, keys or values of two versions."""

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from megatron_mtp.checkpoint.convert.live import load_hf_weights
from megatron_mtp.checkpoint.convert.live_drafter import load_drafter_weights
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.requests import Finish, Update

RUNNING = ("finish", "restart", "abort")
"""What becomes of running requests."""


def update_weights(
    engine: Engine,
    weights: Iterable[tuple[str, Tensor]],
    running: str = "finish",
    like: Path | None = None,
    version: int | None = None,
    drafter: Iterable[tuple[str, Tensor]] | None = None,
    emit: Callable[[list[Update]], object] | None = None,
) -> list[Update]:
    """Give an engine's model new weights, with which waiting requests begin; the cache of beginnings is emptied.

    All tensor-parallel ranks call it, with the same requests.

    Args:
        engine: the engine.
        weights: names and tensors of a Hugging Face folder of the model, all or some (`export_hf_weights`).
        running: 'finish' lets running requests end with the old weights first, 'abort' ends them with the tokens that
            they have, 'restart' computes them anew: the tokens that they had are void, as the version of their next
            updates says.
        like: a folder whose names they have; None for those of an export of the checkpoint that was loaded.
        version: the new `policy_version`; None for one more than the last.
        drafter: names and tensors of the folder of its drafter, all or some (`export_drafter_weights`); None for the
            drafter that it has.
        emit: called with the updates of each step, as they come; it may cancel requests.

    Returns:
        Updates of the requests that finished or were aborted.

    Raises:
        ValueError: there is no such choice, or a tensor is not of this model. After the latter the engine takes no step
            until an update succeeds.
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
    """End all sequences that have begun; those that wait do not notice."""
    begun, version = [seq.number for seq in engine.scheduler.begun], engine.policy_version
    for number in begun:
        engine.cancel(number)
    return [Update(number, [], finish=Finish.ABORT, policy_version=version) for number in begun]
