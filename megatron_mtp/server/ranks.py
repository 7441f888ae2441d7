"""Tensor parallelism of the server: rank 0 handles HTTP, and the other ranks run the same steps.

    rank 0    add, cancel -> its own engine, and a list        send the list, then the step
    others                                                     receive the list -> add, cancel, then the step

Engines with the same requests in the same order run the same steps, so their collectives match. With automatic K, rank
0 chooses K for all (`AutoK.choose`), because each rank has its own clock.
"""

import signal
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from megatron_mtp.decoding.requests import Request
from megatron_mtp.server.codec import Codec
from megatron_mtp.server.detokenizer import OutputText

if TYPE_CHECKING:
    from megatron_mtp.decoding.engine import Engine

IDLE_TIMEOUT = timedelta(days=365)
"""How long ranks wait for a request."""

SentRequest = tuple[Request, tuple[str, ...], int]
"""A request without its detokenizer, with its stop strings and the tokens before them."""

RankMessage = list[SentRequest | int]
"""New requests, and numbers of cancelled requests."""


def sent_request(request: Request) -> SentRequest:
    """Return the request in the form that is sent to other ranks."""
    cut = (request.cut.stops, request.cut.least) if isinstance(request.cut, OutputText) else ((), 0)
    return replace(request, cut=None), *cut


def follow(engine: "Engine", codec: Codec, group: Any) -> None:
    """Run the steps of rank 0 until it ends. Signals are ignored; rank 0 handles them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while (new := broadcast([None], group)) is not None:
        for one in new:
            if isinstance(one, int):
                engine.cancel(one)
            else:
                request, stops, least = one
                cut = OutputText(codec.detokenizer(request.prompt), stops, least) if stops else None
                engine.add(replace(request, cut=cut))
        engine.step()


def group_of_all() -> Any:
    """Create a process group over the hosts that may be idle for any length of time."""
    return torch.distributed.new_group(backend="gloo", timeout=IDLE_TIMEOUT)


def broadcast(messages: list[RankMessage | None], group: Any) -> RankMessage | None:
    """Return the message of rank 0."""
    torch.distributed.broadcast_object_list(messages, src=0, group=group, device=torch.device("cpu"))
    return messages[0]
