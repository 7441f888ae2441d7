"""--mtp-patience: the best state of a run by its evaluations, and an end where it no longer grows.

best.json beside the iterations of --save names the best one, which is whole by then: first the iteration is saved, then
the file is written beside and renamed, then the iteration that it named before is removed, unless --save-interval has
saved it. A kill at any moment leaves a best iteration that is there, and a resumed run goes on from it.

    {"iteration": 400, "expected accepted length": 1.93, "ended": null}

When the run has ended, `ended` is the --train-iters of that run, and the tracker names the best iteration: whatever
loads the checkpoint loads the best state.
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
    """What best.json says."""

    iteration: int
    length: float
    ended: int | None = None

    def write(self, folder: Path) -> None:
        """Write it into the folder of a checkpoint."""
        with written_beside(folder / FILE) as beside:
            named = {"iteration": self.iteration, EXPECTED_LENGTH: self.length, "ended": self.ended}
            beside.write_text(json.dumps(named))

    def settle(self, folder: Path) -> None:
        """Let the tracker name it; a second call changes nothing."""
        if (folder / TRACKER).read_text().strip() != str(self.iteration):
            with written_beside(folder / TRACKER) as beside:
                beside.write_text(str(self.iteration))


def read_best(folder: Path) -> Best | None:
    """The best state of a checkpoint; None where the file is not there, damaged, or names an iteration that is not."""
    try:
        fields = json.loads((folder / FILE).read_text())
        found = Best(int(fields["iteration"]), float(fields[EXPECTED_LENGTH]), fields["ended"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if iteration_of(folder, found.iteration).is_dir() else None


def iteration_of(folder: Path, number: int) -> Path:
    """The folder of an iteration."""
    return folder / f"iter_{number:07d}"


def ended_run(args: Namespace) -> Best | None:
    """The best state of a run that has ended and would only be trained again; None where there are steps to take."""
    if args.mtp_patience is None or args.skip_train or args.finetune or args.save is None or args.load is None:
        return None
    best = read_best(Path(args.save)) if Path(args.save).resolve() == Path(args.load).resolve() else None
    return best if best is not None and best.ended == length_of(args) else None


def length_of(args: Namespace) -> int:
    """Length of the run, in steps or samples."""
    return int(args.train_iters if args.train_samples is None else args.train_samples)


class BestState:
    """The best state so far, the same on all ranks.

    Args:
        args: Megatron's; `iteration` is that of the start.
    """

    def __init__(self, args: Namespace) -> None:
        self._args, self._folder = args, Path(args.save)
        known = read_best(self._folder) if args.iteration else None
        self.best = None if known is None or known.iteration > args.iteration else replace(known, ended=None)
        self._former: Best | None = None

    def improves(self, length: float) -> bool:
        """Return whether an evaluation is better than all before it."""
        return self.best is None or length > self.best.length

    def learn(self, step: int, length: float | None) -> bool:
        """Take in an evaluation, whose figure the last rank alone needs to have; returns whether it is the best.

        All ranks call it. The state has to be saved by `keep` then.
        """
        own = torch.tensor([float("nan") if length is None else length], dtype=torch.float64).cuda()
        torch.distributed.broadcast(own, torch.distributed.get_world_size() - 1)
        if not self.improves(own.item()) or own.isnan().item():
            return False
        self._former, self.best = self.best, Best(step, own.item())
        return True

    def keep(self) -> None:
        """Name the best state, which is saved by now, and remove the one before."""
        former, interval = self._former, self._args.save_interval
        if self._args.rank or self.best is None:
            return
        self.best.write(self._folder)
        if former is not None and (not interval or former.iteration % interval):
            remove(iteration_of(self._folder, former.iteration))

    def is_over(self, step: int) -> bool:
        """Return whether so many evaluations have brought nothing."""
        waits: int = self._args.mtp_patience * self._args.eval_interval
        return self.best is not None and step - self.best.iteration >= waits

    def end(self) -> Best | None:
        """The run has ended: record it, and let the tracker name the best state; returns that."""
        if self.best is not None and self._args.rank == 0:
            replace(self.best, ended=length_of(self._args)).write(self._folder)
            self.best.settle(self._folder)
        return self.best


def evaluates_at(args: Namespace, step: int) -> bool:
    """Return whether Megatron's loop evaluates after this step."""
    begins: Any = getattr(args, "start_eval_at_iter", None)
    return bool(args.do_valid and args.eval_interval) and step % args.eval_interval == 0 and step >= (begins or 0)
