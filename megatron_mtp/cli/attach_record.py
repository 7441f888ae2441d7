"""Record of the settings that a RUN folder of `megatron-mtp attach` was started with. Finished steps depend on them."""

import json
import os
from pathlib import Path
from typing import Any

from megatron_mtp.cli.attach_settings import AttachSettings
from megatron_mtp.common.files import remove, written_beside
from megatron_mtp.common.outputs import is_inside
from megatron_mtp.spec.config import flag_of

RECORD = "attach.json"
"""File in RUN with the settings of its first start, on which finished steps depend."""
KEPT = "model corpus load mtp_layers unroll mtp_init donor drafter drafter_init recipe loss self_generated".split()
"""Names of these settings."""


def check_run(settings: AttachSettings) -> None:
    """Raise ValueError if RUN was started with other settings, or --overwrite would remove files of other programs."""
    file = settings.run / RECORD
    other = "--dry-run" if settings.dry_run else "--only" if settings.only else None
    if settings.overwrite and other:
        raise ValueError(f"--overwrite was given with {other}, which removes nothing; leave one of them out.")
    if settings.overwrite and settings.run.exists() and not file.exists():
        raise ValueError(f"{settings.run} has no {RECORD}, so attach did not make it; name another RUN.")
    sources = [Path(path) for path in (settings.model, settings.corpus, settings.load, settings.donor) if path]
    if settings.overwrite and any(is_inside(path, settings.run) for path in sources):
        raise ValueError(f"--overwrite would delete input files, which are in {settings.run}; name another RUN.")
    if settings.overwrite or not file.exists():
        return
    try:
        kept = {"load": None, "recipe": None, **json.loads(file.read_text())}  # older releases stored neither
        begun = {name: kept[name] for name in KEPT}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); name another RUN, or give --overwrite.") from error
    given = _kept(settings)
    others = [_written(name, begun[name]) for name in KEPT if begun[name] != given[name]]
    if others:
        raise ValueError(
            f"{settings.run} was begun with {', '.join(others)}; give the same to continue, name another RUN, or give "
            "--overwrite to start over."
        )


def keep_settings(settings: AttachSettings) -> None:
    """Write the settings at the first start of RUN. --overwrite first removes everything."""
    if settings.overwrite:
        remove(settings.run)
    if not (settings.run / RECORD).exists():
        settings.run.mkdir(parents=True, exist_ok=True)
        with written_beside(settings.run / RECORD, shared=True) as beside:
            beside.write_text(json.dumps(_kept(settings), indent=1))


def _kept(settings: AttachSettings) -> dict[str, Any]:
    """Return the settings of `KEPT` as a run stores them in its file, with absolute paths."""
    kept = {name: getattr(settings, name) for name in KEPT}
    return kept | {name: os.path.abspath(kept[name]) for name in ("model", "corpus", "load", "donor") if kept[name]}


def _written(name: str, value: Any) -> str:
    flag = name.upper() if name in ("model", "corpus") else flag_of(name)
    return f"no {flag}" if value is None else f"{flag} {value}"
