"""The ranks of a job before they have a process group: who is there, what each says, and an end where one is missing.

All goes through torch's TCPStore. Whatever a rank waits for has a limit; a guard ends a rank that waits longer, also
inside a collective, and says which ranks are not where it is.
"""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

PAUSE = 0.05
"""Seconds between two looks at the store."""

LATER = 3.0
"""Seconds by which the other ranks let rank 0 speak first."""


@dataclass(frozen=True)
class Place:
    """This process among the ranks, and where they meet; `hosted` if the launcher itself keeps the store."""

    rank: int
    ranks: int
    local_rank: int
    address: str
    port: int
    hosted: bool = False

    @property
    def device(self) -> int:
        """The number of this rank's GPU among those that it sees, which may be its own alone."""
        return self.local_rank % max(torch.cuda.device_count(), 1)

    def __str__(self) -> str:
        return f"rank {self.rank} on {platform.node()}"


def place_of(environment: Mapping[str, str]) -> Place:
    """By the variables of torchrun, or those of srun.

    Raises:
        ValueError: neither has started this process.
    """
    if "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        raise ValueError(
            "--distributed is for the ranks of a job, and neither torchrun nor srun has started this process; give "
            "torchrun --nproc-per-node 2 -m megatron_mtp doctor --distributed."
        )
    rank, ranks, local_rank = (int(environment.get(name, "0")) for name in names)
    address = environment.get("MASTER_ADDR") or _first_host(environment.get("SLURM_JOB_NODELIST"))
    port = int(environment.get("MASTER_PORT") or 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000)
    return Place(rank, ranks, local_rank, address, port, environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _first_host(nodes: str | None) -> str:
    """Raises ValueError where SLURM cannot be asked."""
    if nodes is None:
        return "localhost"
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"scontrol does not name the hosts of {nodes} ({error}); give MASTER_ADDR.") from None
    return listed.stdout.split()[0]


class Ranks:
    """What the ranks share before, beside and after a process group.

    Attributes:
        place: of this process.
        store: torch's, for a process group too.
        seconds: that a rank waits for others.
    """

    def __init__(self, place: Place, seconds: float, program: str) -> None:
        """Raises ConnectionError where rank 0 cannot be reached, or some ranks do not come."""
        self.place, self.seconds, self._program = place, seconds, program
        self.store = self._connected()
        self._stage, self._deadline = "", float("inf")
        self._meet()
        threading.Thread(target=self._guard, args=(self.store.clone(),), daemon=True).start()  # type: ignore[attr-defined]

    def _connected(self) -> TCPStore:
        place = self.place
        try:
            return TCPStore(
                place.address,
                place.port,
                place.ranks,
                is_master=place.rank == 0 and not place.hosted,
                timeout=timedelta(seconds=self.seconds),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise ConnectionError(
                f"{place} does not reach {place.address}:{place.port} within {self.seconds:.0f} s; start rank 0, and "
                f"let nodes reach each other's ports ({' '.join(str(error).split())[:120]})."
            ) from None

    def _meet(self) -> None:
        """Rank 0 waits for all, and tells all who is missing."""
        self.store.set(f"here/{self.place.rank}", platform.node())
        if self.place.rank == 0:
            missing = self._missing([f"here/{rank}" for rank in range(self.place.ranks)])
            self.store.set("met", ", ".join(missing) or "all")
        elif self._missing(["met"], LATER):
            raise ConnectionError(f"{self.place} heard nothing from rank 0 for {self.seconds:.0f} s; look at its log.")
        if (missing_ones := self.store.get("met").decode()) != "all":
            raise ConnectionError(
                f"of {self.place.ranks} ranks, these did not come within {self.seconds:.0f} s: {missing_ones}; look at "
                "their logs, and at the nodes they were given."
            )

    def _missing(self, keys: list[str], more: float = 0.0) -> list[str]:
        """The last parts of keys that nobody sets in time."""
        deadline = time.monotonic() + self.seconds + more
        waiting = keys
        while waiting and time.monotonic() < deadline:
            waiting = [key for key in waiting if not self.store.check([key])]
            time.sleep(PAUSE if waiting else 0)
        return [key.rpartition("/")[2] for key in waiting]

    def exchange(self, name: str, value: Any) -> list[Any]:
        """What every rank says, on rank 0; the others get their own alone. The guard ends a wait that is too long."""
        self.store.set(f"{name}/{self.place.rank}", json.dumps(value))
        if self.place.rank:
            return [value]
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.place.ranks)]

    def agree(self, name: str, value: Any = None) -> Any:
        """What rank 0 says, on every rank, which has then heard it."""
        if self.place.rank == 0:
            self.store.set(name, json.dumps(value))
        found = json.loads(self.store.get(name))
        self.store.add(f"{name}/heard", 1)
        deadline = time.monotonic() + self.seconds
        while self.place.rank == 0 and self.store.add(f"{name}/heard", 0) < self.place.ranks:
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE)
        return found

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """While this lasts, the guard ends the process after `seconds`, or when another rank fails."""
        self.store.set(f"at/{self.place.rank}", stage)
        self._stage, self._deadline = stage, time.monotonic() + self.seconds
        try:
            yield
        except Exception as error:  # whatever a library says, the others must not wait for this rank
            said = " ".join(str(error).split())[:200]
            self.store.set("failed", f"{self.place}, in {stage}: {type(error).__name__}: {said}")
            self._deadline = time.monotonic()
            time.sleep(self.seconds + 2 * LATER)  # the guard ends the process
        finally:
            self._deadline = float("inf")

    def _guard(self, store: TCPStore) -> None:
        """Runs in a thread with a connection of its own, since collectives and waits hold the other."""
        while True:
            time.sleep(2 * PAUSE)
            deadline, failed = self._deadline, store.check(["failed"])
            if deadline == float("inf") or not (failed or time.monotonic() > deadline):
                continue
            if self.place.rank:
                time.sleep(LATER)
            sentence = store.get("failed").decode() if failed else self._late(store)
            if not failed or self.place.rank == 0:
                print(f"{self._program}: error: {sentence}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def _late(self, store: TCPStore) -> str:
        others = []
        for rank in range(self.place.ranks):
            stage = store.get(f"at/{rank}").decode() if store.check([f"at/{rank}"]) else "nothing yet"
            if stage != self._stage:
                others.append(f"rank {rank} on {store.get(f'here/{rank}').decode()} is at {stage}")
        where = "; ".join(others) or "all ranks are at it, and one of them does not answer"
        return f"{self.place} waited {self.seconds:.0f} s in {self._stage}: {where}."


def join_group(ranks: Ranks, on_cpu: bool) -> None:
    """The process group of all ranks: gloo on a CPU, NCCL on GPUs."""
    if not on_cpu:
        torch.cuda.set_device(ranks.place.device)
    torch.distributed.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=torch.distributed.PrefixStore("group", ranks.store),  # type: ignore[attr-defined]
        rank=ranks.place.rank,
        world_size=ranks.place.ranks,
        timeout=timedelta(seconds=10 * ranks.seconds),  # the guard ends a wait before, and says who is late
    )
