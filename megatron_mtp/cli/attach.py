"""`megatron-mtp attach MODEL CORPUS RUN`: MTP layers for a Hugging Face model, trained on its frozen trunk.

Every step is a verb of this command line, in a process of its own. A finished step is not repeated, so the same command
continues after an interruption.
"""

import shlex
import subprocess
import sys

from megatron_mtp.cli.attach_flags import check_flags_of_train, checked_settings, parser, words_of_launch
from megatron_mtp.cli.attach_probe import keep_table, left_trial
from megatron_mtp.cli.attach_record import check_run, keep_settings
from megatron_mtp.cli.attach_settings import AttachSettings
from megatron_mtp.cli.attach_steps import STEPS, Step, family_of
from megatron_mtp.cli.verbs import PROGRAM, module_of
from megatron_mtp.common.errors import INTERRUPTED, sentences
from megatron_mtp.megatron.runtime import quieten

__all__ = ["main", "parser"]


def main(arguments: list[str], program: str) -> int:
    """Run all steps, or the one of --only; returns 0, or the exit status of the step that failed."""
    with sentences(program):
        settings = checked_settings(arguments, program)
        check_run(settings)
        check_flags_of_train(settings, program)
    if settings.dry_run:
        for step in STEPS.values():
            if settings.only in (None, step.name):
                command = step.left_command(settings)
                print(f"> {step.makes}: {'finished' if command is None else shlex.join([PROGRAM, *command])}")
        return 0
    with sentences(program):
        keep_settings(settings)
    if settings.only is not None:
        return _only(STEPS[settings.only], settings)
    formless = False
    for step in STEPS.values():
        with sentences(program):
            step.check(settings)
        if formless and step.of_the_folder:
            continue
        if status := (_probe(settings) if step.name == "probe" else _run(step, settings)):
            return status
        if step.name == "start":
            formless = _warned(settings)
    before = "" if settings.drafter else f"before: {settings.run}/before/metrics.jsonl; "
    print(f"> {before}after: {settings.run}/metrics.jsonl")
    print(
        f"> Megatron checkpoint: {settings.run}/checkpoint"
        if formless
        else f"> Hugging Face folder: {settings.run}/exported"
    )
    return 0


def _run(step: Step, settings: AttachSettings) -> int:
    """Run a step in a process of its own, unless it is finished; returns its exit status."""
    with sentences(f"{PROGRAM} attach"):
        command = step.left_command(settings)
        if command is None:
            return 0
        step.prepare(settings)
    print(f"> {step.makes}", flush=True)
    launcher = words_of_launch(settings.launch) if step.on_ranks and settings.launch else [sys.executable]
    try:
        return subprocess.run([*launcher, "-m", "megatron_mtp", *command]).returncode
    except KeyboardInterrupt:  # the step itself has printed a line
        return INTERRUPTED


def _probe(settings: AttachSettings) -> int:
    """Run every trial of the probe that is left; one that fails is the worst. Returns the exit status."""
    while (trial := left_trial(settings)) is not None:
        if (status := _run(STEPS["probe"], settings)) == INTERRUPTED:
            return status
        if status or trial.length is None:
            trial.fail()
    keep_table(settings)
    return 0


def _only(step: Step, settings: AttachSettings) -> int:
    """Run the step of --only in this process; steps of a folder that there can be none of are left out.

    Of the probe it is one trial, and the table once all are finished.
    """
    if step.name == "export":
        with sentences(f"{PROGRAM} attach"):
            step.check(settings)
    if (step.of_the_folder and _warned(settings)) or (command := step.left_command(settings)) is None:
        if step.name == "probe" and settings.trial is None:
            keep_table(settings)
        return 0
    step.prepare(settings)
    verb, *arguments = command
    status: int = module_of(verb).main(arguments, f"{PROGRAM} {verb}")
    if step.name == "start" and not status:
        _warned(settings)
    return status


def _warned(settings: AttachSettings) -> bool:
    """Return whether the attached model has no Hugging Face form, and print that before the training."""
    start = settings.run / "start"
    if settings.drafter or not start.is_dir():
        return False

    quieten()

    from megatron_mtp.checkpoint.convert.export_hf import form_of

    try:
        form_of(start, family=family_of(settings), tokenizer=settings.model)
    except ValueError as error:
        print(
            f"> warning: no Hugging Face folder can hold this model with MTP layers ({error}) They are trained and "
            "draft here as a Megatron checkpoint; export and proof are left out.",
            file=sys.stderr,
            flush=True,
        )
        return True
    return False
