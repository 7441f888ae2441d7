"""Tensor parallelism of the server: rank 0 answers HTTP, and the other ranks take the same steps.

    rank 0    add, cancel -> its own engine, and a list        send the list, then the step
    others                                                     receive the list -> add, cancel, then the step

Engines with the same requests in the same order do the same, so that their collectives meet. Where K is automatic, rank
0 chooses it for all (`AutoK.choose`), since each rank has a clock of its own.
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
"""A request without its detokenizer, with its stop strings and the tokens before these."""

RankMessage = list[SentRequest | int]
"""Requests, and numbers of those that are cancelled."""


def sent_request(request: Request) -> SentRequest:
    """The request as another rank gets it."""
    cut = (request.cut.stops, request.cut.least) if isinstance(request.cut, OutputText) else ((), 0)
    return replace(request, cut=None), *cut


def follow(engine: "Engine", codec: Codec, group: Any) -> None:
    """Take the steps of rank 0 until it ends; signals are for rank 0, which drains."""
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
    """A group on the hosts, which may be idle for as long as nobody asks for anything."""
    return torch.distributed.new_group(backend="gloo", timeout=IDLE_TIMEOUT)


def broadcast(messages: list[RankMessage | None], group: Any) -> RankMessage | None:
    """The message of rank 0."""
    torch.distributed.broadcast_object_list(messages, src=0, group=group, device=torch.device("cpu"))
    return messages[0]
