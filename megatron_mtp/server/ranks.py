"""Tensor parallelism: rank 0 speaks HTTP, and the other ranks take the same steps.

    rank 0    add, cancel -> its own engine, and a list        step -> send the list, then the step
    others                                                     receive the list -> add, cancel, then the step

Engines with the same requests in the same order do the same, so that their collectives meet. Where K is automatic, rank
0 chooses it for all (`AutoK.choose`), since each rank has a clock of its own.
"""

import signal
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from megatron_mtp.decoding.requests import Engine, Load, Request, Update
from megatron_mtp.server.stops import Reading
from megatron_mtp.server.tokens import Ids

IDLE = timedelta(days=365)
"""How long ranks wait for a request."""

Message = list[tuple[Request, tuple[str, ...]] | int]
"""Requests with their stop strings, and numbers of those that are cancelled."""


class Leader:
    """The engine of rank 0; see `requests.Engine`."""

    def __init__(self, engine: Engine, group: Any) -> None:
        self._engine, self._group = engine, group
        self._new: Message = []

    def add(self, request: Request) -> int:
        """Queue a request, here and with the next step everywhere."""
        number = self._engine.add(request)
        stops = request.cut.stops if isinstance(request.cut, Reading) else ()
        self._new.append((replace(request, cut=None), stops))
        return number

    def cancel(self, request: int) -> None:
        """Forget a request."""
        self._engine.cancel(request)
        self._new.append(request)

    def step(self) -> list[Update]:
        """Run one step on all ranks."""
        new, self._new = self._new, []
        _broadcast([new], self._group)
        return self._engine.step()

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return self._engine.busy

    @property
    def load(self) -> Load:
        """How busy it is."""
        return self._engine.load

    def end(self) -> None:
        """Let the other ranks end."""
        _broadcast([None], self._group)


def follow(engine: Engine, codec: Ids, group: Any) -> None:
    """Take the steps of rank 0 until it ends; signals are for rank 0, which drains."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while (new := _broadcast([None], group)) is not None:
        for one in new:
            if isinstance(one, int):
                engine.cancel(one)
            else:
                request, stops = one
                cut = Reading(codec.reader(request.prompt), stops) if stops else None
                engine.add(replace(request, cut=cut))
        engine.step()


def group_of_all() -> Any:
    """A group on the hosts, which may be idle for as long as nobody asks for anything."""
    return torch.distributed.new_group(backend="gloo", timeout=IDLE)


def _broadcast(messages: list[Message | None], group: Any) -> Message | None:
    """What rank 0 says."""
    torch.distributed.broadcast_object_list(messages, src=0, group=group, device=torch.device("cpu"))
    return messages[0]
