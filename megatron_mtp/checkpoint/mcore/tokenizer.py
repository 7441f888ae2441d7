"""The tokenizer of a checkpoint: copied beside its iterations, and found again."""

import filecmp
import shutil
from argparse import Namespace
from pathlib import Path

from megatron_mtp.checkpoint.mcore.iterations import HF_FILES
from megatron_mtp.files import without_weights, written_beside

KEPT_TOKENIZER = "tokenizer"
"""Folder beside a trained checkpoint's iterations, with the files of the run's tokenizer."""
NOWHERE = "/nowhere"
EMBEDDING = "embedding.word_embeddings.weight"


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has files of a tokenizer."""
    return any(folder.glob("tokenizer*"))


def run_tokenizer(args: Namespace, checkpoint: Path) -> Path | None:
    """The folder of the tokenizer of the model in `checkpoint`, which holds all iterations; None if there is none.

    It is the checkpoint's copy, else the folder that the run was given, else the files that a conversion kept.
    """
    given = Path(getattr(args, "tokenizer_model", None) or NOWHERE)
    copy, converted = checkpoint / KEPT_TOKENIZER, checkpoint / HF_FILES
    if copy.is_dir() or given.is_dir():
        return copy if copy.is_dir() else given
    return converted if has_tokenizer(converted) else None


def keep_tokenizer(args: Namespace, checkpoint: Path) -> None:
    """Copy a run's tokenizer beside the iterations of its checkpoint, unless an equal copy is there.

    A relative path in the arguments is replaced by the absolute one.
    """
    source = Path(getattr(args, "tokenizer_model", None) or NOWHERE)
    if not source.is_dir():
        return
    args.tokenizer_model = str(source.resolve())
    target = checkpoint / KEPT_TOKENIZER
    names = [file.name for file in without_weights(source)]
    if source.resolve() == target.resolve() or filecmp.cmpfiles(source, target, names, shallow=False)[0] == names:
        return
    with written_beside(target) as partial:
        partial.mkdir(parents=True)
        for name in names:
            shutil.copyfile(source / name, partial / name)
