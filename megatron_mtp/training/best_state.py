"""Best checkpoint and early stopping (--mtp-patience), based on evaluations.

best.json, in the folder of --save, names the best iteration. The iteration is saved first. Then the file is written to
a temporary path and renamed. Then the previous best iteration is removed, unless --save-interval has saved it. So after
a kill at any moment best.json names a complete iteration, and the run can resume from it.

    {"iteration": 400, "expected accepted length": 1.93, "ended": null}

When the run has ended, `ended` is its --train-iters, and the tracker names the best iteration, so anything that loads
the checkpoint loads the best state.
"""

import json
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.common.acceptance import EXPECTED_LENGTH
from megatron_mtp.common.files import remove, written_beside
from megatron_mtp.megatron.checkpoint import TRACKER

FILE = "best.json"


@dataclass(frozen=True)
class Best:
    """Contents of best.json."""

    iteration: int
    length: float
    ended: int | None = None

    def write(self, folder: Path) -> None:
        """Write best.json to a checkpoint folder."""
        with written_beside(folder / FILE) as beside:
            named = {"iteration": self.iteration, EXPECTED_LENGTH: self.length, "ended": self.ended}
            beside.write_text(json.dumps(named))

    def settle(self, folder: Path) -> None:
        """Make the tracker name the best iteration. Calling it again has no effect."""
        if (folder / TRACKER).read_text().strip() != str(self.iteration):
            with written_beside(folder / TRACKER) as beside:
                beside.write_text(str(self.iteration))


def read_best(folder: Path) -> Best | None:
    """Read best.json of a checkpoint; None if it is missing or damaged, or its iteration does not exist."""
    try:
        fields = json.loads((folder / FILE).read_text())
        found = Best(int(fields["iteration"]), float(fields[EXPECTED_LENGTH]), fields["ended"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if iteration_of(folder, found.iteration).is_dir() else None


def iteration_of(folder: Path, number: int) -> Path:
    """Return the folder of an iteration."""
    return folder / f"iter_{number:07d}"


def ended_run(args: Namespace) -> Best | None:
    """Return the best state of a run that has already ended; None if there are steps to run."""
    if args.mtp_patience is None or args.skip_train or args.finetune or args.save is None or args.load is None:
        return None
    best = read_best(Path(args.save)) if Path(args.save).resolve() == Path(args.load).resolve() else None
    return best if best is not None and best.ended == length_of(args) else None


def length_of(args: Namespace) -> int:
    """Return the length of the run, in steps or samples."""
    return int(args.train_iters if args.train_samples is None else args.train_samples)


class BestState:
    """Tracks the best state so far, the same on all ranks.

    Args:
        args: Megatron's arguments; `iteration` is the first one of this run.
    """

    def __init__(self, args: Namespace) -> None:
        self._args, self._folder = args, Path(args.save)
        known = read_best(self._folder) if args.iteration else None
        self.best = None if known is None or known.iteration > args.iteration else replace(known, ended=None)
        self._former: Best | None = None

    def improves(self, length: float) -> bool:
        """Return whether an evaluation is better than all previous ones."""
        return self.best is None or length > self.best.length

    def learn(self, step: int, length: float | None) -> bool:
        """Record an evaluation and return whether it is the best. Only the last rank needs its value.

        All ranks must call it. If it returns true, save the state and call `keep`.
        """
        own = torch.tensor([float("nan") if length is None else length], dtype=torch.float64).cuda()
        torch.distributed.broadcast(own, torch.distributed.get_world_size() - 1)
        if not self.improves(own.item()) or own.isnan().item():
            return False
        self._former, self.best = self.best, Best(step, own.item())
        return True

    def keep(self) -> None:
        """Record the best state, which has been saved, and remove the previous one."""
        former, interval = self._former, self._args.save_interval
        if self._args.rank or self.best is None:
            return
        self.best.write(self._folder)
        if former is not None and (not interval or former.iteration % interval):
            remove(iteration_of(self._folder, former.iteration))

    def is_over(self, step: int) -> bool:
        """Return whether `--mtp-patience` evaluations have brought no improvement."""
        waits: int = self._args.mtp_patience * self._args.eval_interval
        return self.best is not None and step - self.best.iteration >= waits

    def end(self) -> Best | None:
        """Record the end of the run and make the tracker name the best state, which is returned."""
        if self.best is not None and self._args.rank == 0:
            replace(self.best, ended=length_of(self._args)).write(self._folder)
            self.best.settle(self._folder)
        return self.best


def evaluates_at(args: Namespace, step: int) -> bool:
    """Return whether Megatron's loop evaluates after this step."""
    begins: Any = getattr(args, "start_eval_at_iter", None)
    return bool(args.do_valid and args.eval_interval) and step % args.eval_interval == 0 and step >= (begins or 0)
