"""Runs the cases and judges them: a verdict for each, with the cause if it is known."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.extensions.prove import worker
from megatron_mtp.extensions.prove.cases import BATCHES, MICROBATCHES, Case, batch_of
from megatron_mtp.extensions.prove.hypotheses import (
    OFFSETS,
    Hypothesis,
    hypotheses,
    place_of,
    scaled_log,
    weighed,
)
from megatron_mtp.extensions.prove.reference import (
    PAPER,
    Expected,
    Microbatch,
    Model,
    Rule,
    Weights,
    expected,
    total_of,
)
from megatron_mtp.extensions.prove.shrink import Tiny

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 3e-4
"""Tolerances relative to a logged loss and a gradient's largest entry; float32 and float64 differ by 1e-6 and 3e-6."""

LOSS_IN_BF16, GRADIENT_IN_BF16 = 4e-3, 0.1
"""Tolerances in BF16, relative to the norm of a gradient; right cases differ by up to 1.3e-3 and 0.065
(docs/extensions/prove.md)."""

SILENCE = 240.0
"""Seconds without a message from the ranks after which all of them are killed."""

ATTACHED = Rule(divisor="main")
"""Rule of attached layers with a per-token loss: sums divided by the targets of the main loss, as in eq. 24."""

RIGHT, WRONG, NOT_RUN, BASE = "right", "WRONG", "not run", "base"


@dataclass(frozen=True)
class Verdict:
    """Result of a case.

    Attributes:
        status: RIGHT, WRONG, NOT_RUN, or BASE for the single process that other layouts are compared with.
        logged, right: losses by depth, as logged by Megatron and as they should be.
        worst: name of the gradient with the largest error, and that error relative to its largest entry; "" for none.
        wrong: number of wrong gradients, and number of all gradients.
        cause: the cause that gives Megatron's numbers, or None.
        words: why a case was not judged, or what happened instead of a result.
        convention: "eq. 24-25", or "1 process" if the case could only be compared with a single process.
    """

    case: Case
    status: str
    logged: tuple[float, ...] = ()
    right: tuple[float, ...] = ()
    worst: tuple[str, float] = ("", 0.0)
    wrong: tuple[int, int] = (0, 0)
    cause: Hypothesis | None = None
    words: str = ""
    convention: str = "eq. 24-25"


@dataclass(frozen=True)
class Proof:
    """All verdicts about a Megatron.

    Attributes:
        version, source: Megatron's version and its multi_token_prediction.py; "" and None for a step that the user's
            loop has saved.
        stand_ins: parts that are substituted in these runs, and why.
        skipped: reasons for layouts without a case.
    """

    version: str
    source: Path | None
    tiny: Tiny
    verdicts: list[Verdict]
    stand_ins: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether no case is wrong and at least one was judged."""
        statuses = {verdict.status for verdict in self.verdicts}
        return WRONG not in statuses and not statuses.isdisjoint((RIGHT, BASE))


def prove(tiny: Tiny, cases: Sequence[Case], skipped: dict[str, str], megatron: Path | None, seconds: float) -> Proof:
    """Run the cases with the Megatron in a folder, or the installed one, and judge them.

    Args:
        seconds: time limit of a case, after which its ranks are killed.

    Raises:
        ValueError: Megatron cannot be imported.
    """
    torch.set_num_threads(1)  # the matrices are too small for threads
    with (
        tempfile.TemporaryDirectory(prefix="prove-") as name,
        _ranks(tiny, cases, megatron, seconds, Path(name)) as told,
    ):
        said = next(told, {})["megatron"]
        judge = Judge(tiny)
        verdicts = [judge.verdict(cases[event["case"]], event) for event in told]
    seen = {id(verdict.case) for verdict in verdicts}
    verdicts += [
        Verdict(case, NOT_RUN, words="the ranks were killed before it") for case in cases if id(case) not in seen
    ]
    verdicts.sort(key=lambda verdict: cases.index(verdict.case))
    return Proof(said["version"], Path(said["file"]), tiny, judge.with_causes(verdicts), said["stand_ins"], skipped)


# --- the ranks -------------------------------------------------------------------------------------------------------


@contextmanager
def _ranks(
    tiny: Tiny, cases: Sequence[Case], megatron: Path | None, seconds: float, folder: Path
) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the messages of the ranks as they arrive."""
    if megatron is not None and not (megatron / "megatron/core").is_dir():
        raise ValueError(f"--megatron {megatron} has no folder megatron/core; give a checkout of Megatron-LM.")
    job = {
        "config": tiny.config,
        "model": tiny.model,
        "attached": tiny.attached,
        "seconds": seconds,
        "batches": {kind: [batch_of(kind, number).as_dict() for number in range(MICROBATCHES * 2)] for kind in BATCHES},
        "cases": [
            {
                "layout": vars(case.layout) | {"ranks": case.layout.ranks},
                "batch": case.batch,
                "config": case.settings(tiny.depths),
                "in_bf16": case.in_bf16,
                "microbatches": case.microbatches // case.layout.data,
            }
            for case in cases
        ],
    }
    torch.save(job, folder / "job.pt")
    environment = environment_of(megatron, reads_package=tiny.attached)
    with (folder / "errors").open("w+") as errors:
        command = [sys.executable, "-P", worker.__file__, str(folder / "job.pt"), str(folder)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            yield _told(process, errors, megatron)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()


def environment_of(megatron: Path | None, reads_package: bool) -> dict[str, str]:
    """Return the environment of the CPU process to be judged.

    Args:
        megatron: folder that comes first in its module path.
        reads_package: whether it imports this package.
    """
    paths = [str(megatron.absolute())] if megatron is not None else []
    paths += [str(Path(__file__).parents[3])] if reads_package else []
    paths += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # required by Megatron for TP and CP
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "NO_VCS_VERSION": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def _told(process: "subprocess.Popen[str]", errors: Any, megatron: Path | None) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    started = False
    while True:
        watchdog = Timer(SILENCE, lambda: os.killpg(process.pid, 9))
        watchdog.start()
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            break
        if line.startswith("{"):
            event = json.loads(line)
            _check_origin(event, megatron)
            started = True
            yield event
    if not started:
        errors.seek(0)
        last = [one.strip() for one in errors if one.strip()][-1:] or [f"no response within {SILENCE:.0f} seconds"]
        where = f"of --megatron {megatron} " if megatron is not None else ""
        raise ValueError(
            f"the Megatron-Core {where}cannot be imported ({last[0][:200]}); install what is missing, or correct "
            "PYTHONPATH."
        )


def _check_origin(event: dict[str, Any], megatron: Path | None) -> None:
    """Raise ValueError if the imported Megatron is not the one in the folder."""
    if megatron is not None and "megatron" in event:
        file = Path(event["megatron"]["file"])
        if (megatron / "megatron/core").resolve() not in file.resolve().parents:
            raise ValueError(f"--megatron {megatron} is not what Python imports, but {file}; uninstall that one.")


# --- the judge -------------------------------------------------------------------------------------------------------


class Judge:
    """Compares results of the ranks with eq. 21-25, or with one process if the equations do not describe the model."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.alone: dict[Any, tuple[Expected, Expected]] = {}  # results of one process, with and without MTP
        self.foreign = ""  # why eq. 21-25 do not apply to the model
        self.candidates: dict[int, list[Hypothesis]] = {}
        self.tried: list[Hypothesis] = []

    def verdict(self, case: Case, event: dict[str, Any]) -> Verdict:
        """Judge a case from the message of its ranks."""
        if "failed" in event:
            return self._of_failure(case, event)
        found = torch.load(event["file"], weights_only=True)
        Path(event["file"]).unlink()
        weights = {name: weight.double().requires_grad_() for name, weight in found["weights"].items()}
        model = Model(weights, self.tiny.config, self.tiny.model)
        batches = [
            Microbatch.of(batch_of(case.batch, number), case.layout.context) for number in range(case.microbatches)
        ]
        step, control = (Expected(found[of]["logged"], found[of]["gradients"]) for of in ("step", "control"))
        if not self.alone:
            self.foreign = self._why_foreign(model, batches, found)
        same = case.batch, case.per_token, case.microbatches
        is_base = case.layout.ranks == 1 and not case.recompute
        if is_base:
            self.alone[same] = step, control
        if self.foreign and is_base:
            return Verdict(case, BASE, tuple(step.logged), convention="1 process")
        if self.foreign:
            return self._beside_one_process(case, found, step, control, self.alone.get(same))
        if words := self._trunk_off(model, batches, case, found):
            return Verdict(case, NOT_RUN, words=words)
        return self._of_equations(case, model, batches, step, found["step"]["apart"])

    def of_step(self, case: Case, model: Model, batches: Sequence[Microbatch], step: Expected) -> Verdict:
        """Judge a step that the user's own loop has saved."""
        try:
            unknown = _unused(model, batches[0])
        except (KeyError, RuntimeError, IndexError) as error:
            return Verdict(case, NOT_RUN, words=f"the weights are not those of the flags ({_short(error)})")
        if used := [name for name in unknown if float(step.gradients[name].abs().max()) > 0]:
            return Verdict(case, NOT_RUN, words=f"it has weights of its own ({', '.join(used)[:80]})")
        return self._of_equations(case, model, batches, step, {})

    def _of_equations(
        self, case: Case, model: Model, batches: Sequence[Microbatch], step: Expected, apart: dict[str, float]
    ) -> Verdict:
        right = expected(model, batches, case.per_token, ATTACHED if self.tiny.attached and case.per_token else PAPER)
        verdict = _compared(case, step, right, apart)
        if verdict.status == WRONG and not case.in_bf16:
            self.candidates[id(case)] = self._causes(case, model, batches, step, right)
        return verdict

    def _of_failure(self, case: Case, event: dict[str, Any]) -> Verdict:
        failed = str(event["failed"])
        refusal = re.match(r"rank \d+: (?:ValueError|AssertionError|NotImplementedError): (.*)", failed)
        in_mtp = "multi_token_prediction.py" in failed
        if refusal is not None and not in_mtp:
            return Verdict(case, NOT_RUN, words=f"Megatron refuses it: {refusal[1]}")
        if event["in"] != "step":
            words = "it fails without MTP layers too" if event["in"] else "Megatron does not build it"
            return Verdict(case, NOT_RUN, words=f"{words}: {failed}")
        if case.batch == "padded" and case.layout.context > 1 and in_mtp:
            self.candidates[id(case)] = [OFFSETS]
        return Verdict(case, WRONG, words=failed)

    def _why_foreign(self, model: Model, batches: Sequence[Microbatch], found: dict[str, Any]) -> str:
        """Return why eq. 21-25 do not describe the model (a different trunk, or additional weights), or ""."""
        try:
            with torch.no_grad():
                main = sum(float((values * mask).sum()) for (values, mask), *_ in map(model.losses, batches))
            unknown = _unused(model, batches[0])
        except (KeyError, RuntimeError) as error:
            return f"a weight is missing or has another shape ({_short(error)})"
        if abs(sum(found["control"]["main"]) - main) > LOSS_TOLERANCE * main:
            return "its trunk has another loss"
        gradients: Weights = found["step"]["gradients"]
        used = [name for name in unknown if float(gradients[name].abs().max()) > 0]
        return f"it has weights of its own ({', '.join(used)[:80]})" if used else ""

    def _beside_one_process(
        self,
        case: Case,
        found: dict[str, Any],
        step: Expected,
        control: Expected,
        alone: tuple[Expected, Expected] | None,
    ) -> Verdict:
        if alone is None:
            return Verdict(case, NOT_RUN, words=f"eq. 21-25 do not describe the model: {self.foreign}")
        without = _compared(case, control, alone[1], found["control"]["apart"])
        if without.status != RIGHT:
            return Verdict(case, NOT_RUN, words=_of_trunk(without))
        return replace(_compared(case, step, alone[0], found["step"]["apart"]), convention="1 process")

    def _trunk_off(self, model: Model, batches: Sequence[Microbatch], case: Case, found: dict[str, Any]) -> str:
        """Return why MTP cannot be judged, if gradients are wrong even without MTP layers; otherwise ""."""
        without = Model(model.weights, model.config | {"mtp_num_layers": 0, "mtp_loss_scaling_factor": 0}, model.model)
        right = expected(without, batches, case.per_token)
        names = found["control"]["gradients"]
        here = Expected([], {name: right.gradients[name] for name in names})
        verdict = _compared(case, Expected([], names), here, found["control"]["apart"])
        return "" if verdict.status == RIGHT else _of_trunk(verdict)

    # --- causes ----------------------------------------------------------------------------------------------------

    def _causes(
        self, case: Case, model: Model, batches: Sequence[Microbatch], step: Expected, right: Expected
    ) -> list[Hypothesis]:
        """Find the causes that give all of Megatron's numbers, trying those that explained other cases first."""
        possible = list(hypotheses(case, self.tiny))
        before = [one for one in self.tried if one in possible]
        computed = chain(
            weighed(step.gradients, right.gradients, case, self.tiny), scaled_log(step.logged, right.logged)
        )
        with torch.no_grad():
            trunks = [model.trunk(batch, batch.visible()) for batch in batches]
        for group in (before, [one for one in [*possible, *computed] if one not in before]):
            fitting = [one for one in group if self._fits(one.rule, case, model, batches, trunks, step)]
            if fitting:
                self.tried += [one for one in fitting if one not in self.tried]
                return fitting
        return []

    @staticmethod
    def _fits(
        rule: Rule,
        case: Case,
        model: Model,
        batches: Sequence[Microbatch],
        trunks: Sequence[tuple[Tensor, Tensor]],
        step: Expected,
    ) -> bool:
        with torch.no_grad():
            found = [model.losses(batch, rule, trunk) for batch, trunk in zip(batches, trunks, strict=True)]
            logged, _ = total_of(model, batches, found, case.per_token, rule)
        silent = not step.logged and rule.factor == 0
        if not silent and not _near(step.logged, logged, case.in_bf16):
            return False
        bent = expected(model, batches, case.per_token, rule)
        return _compared(case, step, Expected([], bent.gradients) if silent else bent, {}).status == RIGHT

    def with_causes(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Add a cause to each verdict: of all that fit, the one that explains the most cases.

        In BF16 many causes are within the tolerances, so a case takes the cause of the same case in float32.
        """
        counts = Counter(hypothesis for fitting in self.candidates.values() for hypothesis in fitting)
        found = []
        for verdict in verdicts:
            case = verdict.case
            if case.in_bf16 and verdict.status == WRONG:
                case = next((one.case for one in verdicts if one.case == replace(case, in_bf16=False)), case)
            fitting = self.candidates.get(id(case), [])
            found.append(replace(verdict, cause=max(fitting, key=lambda one: counts[one], default=None)))
        return found


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:80]


def _of_trunk(verdict: Verdict) -> str:
    name, far = verdict.worst
    return f"gradients are wrong without MTP layers too ({name} by {far:.1%})"


def _unused(model: Model, batch: Microbatch) -> list[str]:
    """Return the weights that no loss of the reference depends on."""
    total = sum((values * mask).sum() for values, mask in model.losses(batch, PAPER))
    gradients = torch.autograd.grad(torch.as_tensor(total), list(model.weights.values()), allow_unused=True)
    return [name for name, one in zip(model.weights, gradients, strict=True) if one is None]


def _near(found: Sequence[float], right: Sequence[float], in_bf16: bool) -> bool:
    tolerance = LOSS_IN_BF16 if in_bf16 else LOSS_TOLERANCE
    return len(found) == len(right) and all(
        abs(one - other) <= tolerance * max(abs(other), 1e-6) for one, other in zip(found, right, strict=True)
    )


def _compared(case: Case, found: Expected, right: Expected, apart: dict[str, float]) -> Verdict:
    """Judge whether losses and all gradients agree, and whether copies of weights agree with each other."""
    order = 2.0 if case.in_bf16 else inf
    sizes = {name: float(one.double().norm(order)) for name, one in right.gradients.items()}
    least, far = 1e-4 * max(sizes.values()), {}
    for name, gradient in right.gradients.items():
        distance = float((found.gradients[name].double() - gradient).norm(order)) / max(sizes[name], least)
        far[name] = max(distance, apart.get(name, 0.0))
    tolerance = GRADIENT_IN_BF16 if case.in_bf16 else GRADIENT_TOLERANCE
    wrong = [name for name, distance in far.items() if not distance <= tolerance]
    worst = max(far, key=lambda name: far[name])
    return Verdict(
        case,
        RIGHT if not wrong and _near(found.logged, right.logged, case.in_bf16) else WRONG,
        tuple(found.logged),
        tuple(right.logged),
        (worst, far[worst]) if wrong else ("", 0.0),
        (len(wrong), len(far)),
    )


def place(verdict: Verdict, proof: Proof) -> str:
    """Return FILE:LINE of a verdict's cause in Megatron's own block."""
    if verdict.cause is None or proof.source is None or proof.tiny.attached:
        return ""
    return place_of(verdict.cause, proof.source)
