"""Checks of `megatron-mtp attach` before the first step."""

import math
import shutil
from dataclasses import replace

from megatron_mtp.checkpoint.families import trained_forms
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.cli.attach_probe import candidates
from megatron_mtp.cli.attach_settings import SET_BY_ATTACH, AttachSettings, names_of, offered_losses, words_of_launch
from megatron_mtp.cli.attach_training import is_chat_file
from megatron_mtp.common.command import check_counts
from megatron_mtp.common.errors import Parser, did_you_mean
from megatron_mtp.common.outputs import check_outside
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.spec.config import flag_of, loss_parts, number_of
from megatron_mtp.spec.kinds import DRAFTERS, fitted_kind

LEAST_TEXTS = 25


def checked(settings: AttachSettings) -> AttachSettings:
    """Return settings that can run, with the donor's folder and MTP layers filled in. Raise ValueError otherwise."""
    settings = _with_donor(settings)
    if not (settings.model / "config.json").is_file():
        raise ValueError(f"{settings.model} has no config.json; give the folder of a Hugging Face model.")
    _check(settings)
    _check_texts(settings)
    return settings


def check_flags_of_train(settings: AttachSettings, own: Parser) -> None:
    """Reject flags that `train` would reject or that attach sets itself. Raise ValueError."""
    for word in names_of(settings.more):
        if word in SET_BY_ATTACH:
            raise ValueError(f"{word} is set by attach; give {SET_BY_ATTACH[word]} in its place.")
    if not settings.more:
        return
    quieten()

    from megatron_mtp.cli.train import full_parser

    of_train = full_parser(own.prog)
    _, unknown = of_train.parse_known_args(settings.more)
    if unknown:
        wrong = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        known = own._option_string_actions, of_train._option_string_actions
        advice = did_you_mean(wrong, known[0]) or did_you_mean(wrong, known[1])
        raise ValueError(f"neither attach nor train has {' '.join(unknown)}{advice or '; see --help of both.'}")


def _with_donor(settings: AttachSettings) -> AttachSettings:
    """Find the donor, and use as many layers as it has. Raise ValueError if flags contradict each other."""
    if settings.donor is None and settings.mtp_init == "donor":
        raise ValueError("--mtp-init donor needs --donor MODEL, a model with MTP layers.")
    if settings.donor is None:
        return settings
    if settings.mtp_init not in (None, "donor"):
        raise ValueError(f"--donor was given with --mtp-init {settings.mtp_init}; leave one of them out.")
    folder = local_folder(settings.donor)
    quieten()

    from megatron_mtp.checkpoint.convert.graft import open_side

    donor = open_side(folder)
    donor.check_runs()
    if not (depths := donor.depths):
        raise ValueError(f"--donor is {folder}, which has no MTP layers; give a model that has some.")
    if settings.mtp_layers not in (None, depths):
        raise ValueError(f"--mtp-layers is {settings.mtp_layers}, and {folder} has {depths} MTP layers; leave it out.")
    return replace(settings, donor=folder, mtp_layers=depths if depths > 1 else settings.mtp_layers)


def _check(settings: AttachSettings) -> None:
    """Raise ValueError for what a later step would refuse, before earlier steps take their time."""
    check_counts(settings, "mtp_layers", "unroll", "steps", "sequence", "batch", "save_every")
    if settings.unroll is not None and settings.mtp_layers not in (None, 1):
        raise ValueError(
            f"--mtp-layers is {settings.mtp_layers} with --unroll, which trains one layer; leave one of them out."
        )
    for flag in ("--mtp-layers", "--unroll", "--mtp-init", "--donor"):
        if settings.drafter and getattr(settings, flag[2:].replace("-", "_")) is not None:
            raise ValueError(
                f"--drafter {settings.drafter} was given with {flag}, which is of MTP layers; drop one of them."
            )
    kind = None if settings.drafter is None else DRAFTERS[settings.drafter]
    if settings.drafter_init == "fitted" and (kind is None or not kind.can_be_fitted or is_chat_file(settings.corpus)):
        fitted = fitted_kind()
        raise ValueError(
            f"--drafter-init fitted needs {fitted.called} (--drafter {fitted.name}) and plain text; give random."
        )
    if kind is not None and kind.fills_blocks and number_of(settings.token_fraction) != 1:
        raise ValueError(
            f"--token-fraction was given with --drafter {settings.drafter}, whose blocks are --drafter-blocks; give "
            "that."
        )
    check_outside(settings.run, settings.model)
    if settings.learning_rate is not None and not 0 < number_of(settings.learning_rate) < math.inf:
        raise ValueError(f"--learning-rate is {settings.learning_rate}; give a number above 0.")
    if settings.loss is not None and not {name for name, _ in loss_parts(settings.loss, "--loss")} <= {
        *offered_losses()
    }:
        raise ValueError(f"--loss is '{settings.loss}'; choose among {', '.join(offered_losses())}.")
    if not 0 < number_of(settings.token_fraction) <= 1:
        raise ValueError(f"--token-fraction is {settings.token_fraction}; give a number above 0, and at most 1.")
    for name in ("evaluated_batches", "patience"):
        if not (value := getattr(settings, name)).isdecimal() or int(value) < 1:
            raise ValueError(f"{flag_of(name)} is {value}; give 1 or more.")
    last = len(candidates(settings)) - 1
    if settings.trial is not None and (settings.only != "probe" or not 0 <= settings.trial <= last):
        raise ValueError(f"--trial is {settings.trial}; give --only probe with it, and a number from 0 to {last}.")
    if settings.load is not None:
        from megatron_mtp.megatron.checkpoint.iterations import is_checkpoint

        if not is_checkpoint(settings.load):
            raise ValueError(f"--load is {settings.load}, which is not a Megatron checkpoint; give one of the trunk.")
    for flag in ("donor", "mtp_init") if settings.load is not None else ():
        if getattr(settings, flag) not in (None, "last-layer", "random"):
            raise ValueError(
                f"{flag_of(flag)} was given with --load, for trunks too large for one machine; drop the flag, or make "
                "a checkpoint with MTP layers by megatron-mtp convert."
            )
    if settings.family is not None and settings.family not in trained_forms():
        raise ValueError(f"--family is '{settings.family}'; give one of {', '.join(trained_forms())}.")
    if settings.launch is not None and shutil.which((words_of_launch(settings.launch) or [""])[0]) is None:
        raise ValueError(f"--launch is '{settings.launch}', and this machine has no such program; correct it.")


def _check_texts(settings: AttachSettings) -> None:
    """Raise ValueError if flags do not match the user's texts."""
    count = settings.self_generated
    if count is not None and count < LEAST_TEXTS:
        raise ValueError(f"--self-generated is {count}; give {LEAST_TEXTS} or more: 2 % of the samples are held out.")
    if settings.texts_by is not None and count is None:
        raise ValueError("--texts-by was given without --self-generated; give the number of samples with it.")
    if settings.mtp_init == "fitted" and is_chat_file(settings.corpus):
        raise ValueError(
            "--mtp-init fitted needs plain text, and the corpus has only chats; give last-layer or random."
        )
