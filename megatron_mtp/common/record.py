"""The record of acceptance of a folder: read by engines, and carried along by conversions."""

import json
import shutil
from itertools import accumulate
from operator import mul
from pathlib import Path

from megatron_mtp.common.acceptance import RECORD


def read_record(folder: Path, of_drafter: bool = False) -> list[float] | None:
    """Read the recorded acceptance by position of the model in a folder, greedy or sampled; None if there is no record.

    Args:
        of_drafter: read the record of the drafter instead of the MTP layers', in a model that has both.

    Raises:
        ValueError: the record is damaged.
    """
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        record = record["drafter"] if of_drafter else record
        sampled = list(accumulate(map(float, record["overlap"]), mul))
        return [min(map(float, pair)) for pair in zip(record["acceptance"], sampled, strict=True)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a record of acceptance; remove it, or evaluate the model again.") from error


def carry_record(source: Path, target: Path) -> None:
    """Copy the acceptance record of a folder, if there is one, to a conversion of the same model."""
    if (source / RECORD).is_file():
        shutil.copyfile(source / RECORD, target / RECORD)
