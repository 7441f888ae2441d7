"""What lies between ranks: how far their clocks are apart, and how fast collectives move bytes.

Both run on all ranks of a process group together. Bandwidths are bus bandwidths, as nccl-tests defines them: bytes that
each rank's link carries in a second, which do not depend on the number of ranks.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PINGS, ROUNDS = 5, 5
MIB = 2**20


def clock_offset(group: Any) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's: the ping of least delay, as NTP takes it."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    offset = 0.0
    for other in range(1, ranks):
        pings = [_ping(rank, other, group) for _ in range(PINGS)] if rank in (0, other) else []
        if rank == 0:
            best = min(pings)[1]
            torch.distributed.send(torch.tensor([best], dtype=torch.float64, device="cpu"), other, group)
        elif rank == other:
            answer = torch.zeros(1, dtype=torch.float64, device="cpu")
            torch.distributed.recv(answer, 0, group)
            offset = answer.item()
    return offset


def _ping(rank: int, other: int, group: Any) -> tuple[float, float]:
    """On rank 0 the delay of a round trip, and how far the other's clock is ahead in the middle of it."""
    stamp = torch.zeros(1, dtype=torch.float64, device="cpu")
    if rank == other:
        torch.distributed.recv(stamp, 0, group)
        stamp[0] = time.time()
        torch.distributed.send(stamp, 0, group)
        return 0.0, 0.0
    begun = time.time()
    torch.distributed.send(stamp, other, group)
    torch.distributed.recv(stamp, other, group)
    ended = time.time()
    return ended - begun, stamp.item() - (begun + ended) / 2


def bandwidths(on_cpu: bool) -> dict[str, float]:
    """Bytes a second of all-reduce and all-gather over all ranks, by the slowest rank; the same on every rank."""
    ranks = torch.distributed.get_world_size()
    size = (8 if on_cpu else 256) * MIB // (4 * ranks) * ranks
    whole = torch.ones(size).cuda()
    part = whole[: size // ranks].clone()
    reduced = _seconds(lambda: torch.distributed.all_reduce(whole), on_cpu)
    gathered = _seconds(lambda: torch.distributed.all_gather_into_tensor(whole, part), on_cpu)
    share = 4 * size * (ranks - 1) / ranks
    return {"all-reduce": 2 * share / reduced, "all-gather": share / gathered}


def _seconds(collective: Callable[[], object], on_cpu: bool) -> float:
    """The median round of the slowest rank."""
    spent = []
    for _ in range(2 + ROUNDS):
        torch.distributed.barrier()
        begun = time.perf_counter()
        collective()
        if not on_cpu:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - begun)
    slowest: Tensor = torch.tensor([statistics.median(spent[2:])]).cuda()
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    return slowest.item()
