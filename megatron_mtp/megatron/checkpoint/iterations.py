"""A folder that Megatron saves to: its iterations, and the tokenizer and Hugging Face files stored with them."""

import filecmp
import json
import os
import re
import shutil
from argparse import Namespace
from pathlib import Path

from megatron_mtp.common.files import without_weights, written_beside
from megatron_mtp.megatron.checkpoint import HF_FILES, KEPT_TOKENIZER, RELEASE, TRACKER
from megatron_mtp.megatron.checkpoint.catalogue import CATALOGUE, FORMAT

SENTENCE_PIECES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Values of Megatron's --tokenizer-type for which --tokenizer-model is a SentencePiece model."""
_ITERATION = re.compile(r"^iter_(\d{7})$")


def repair_tracker(folder: Path) -> int | None:
    """Write `unnamed_iteration` to the tracker that a killed run left empty, and return it."""
    newest = unnamed_iteration(folder)
    if newest is not None:
        with written_beside(folder / TRACKER, shared=True) as beside:
            beside.write_text(str(newest))
    return newest


def unnamed_iteration(folder: Path) -> int | None:
    """Return the newest complete iteration if a killed run left the tracker empty; None if the tracker is not empty.

    Megatron writes the tracker in place, and exits with status 0 if it is empty.

    Raises:
        ValueError: the tracker is empty, and no iteration is complete.
    """
    tracker = folder / TRACKER
    if not tracker.is_file() or tracker.read_bytes().strip():
        return None
    whole = _whole_iterations(folder)
    if not whole:
        raise ValueError(
            f"--load is {folder}, whose {TRACKER} is empty and which has no whole iteration; give another checkpoint, "
            "or remove the folder to start anew."
        )
    return max(whole)


def named_iteration(folder: Path, step: int | None = None) -> Path:
    """Return the folder of iteration `step` (--ckpt-step), or of the one in the tracker.

    Raise ValueError if there is none.
    """
    if not folder.is_dir():
        raise ValueError(f"{_what(folder)}; {_GIVE}.")
    tracker = folder / TRACKER
    if step is not None:
        named, source = str(step), f"--ckpt-step is {step}"
    elif tracker.is_file():
        named = tracker.read_bytes().decode(errors="replace").strip()
        source = f"{tracker} names {named[:40]!a}"
    elif whole := _named_in(folder):
        raise ValueError(
            f"{folder} lacks the file {TRACKER}, which names the iteration to load; write the name of a whole one into "
            f"it ({', '.join(whole)}), or give the folder of an iteration."
        )
    elif (folder / "config.json").is_file():
        raise ValueError(f"{folder} is a Hugging Face folder; give what megatron-mtp convert hf-to-mcore makes of it.")
    else:
        raise ValueError(f"{folder} is not a Megatron distributed checkpoint, for it has no file {TRACKER}; {_GIVE}.")
    there = ", ".join(_named_in(folder)) or "it has no iterations"
    if named != RELEASE and not named.isdecimal():
        raise ValueError(f"{source}, which is not an iteration; write the number of one into it ({there}).")
    inner = folder / (RELEASE if named == RELEASE else f"iter_{int(named):07d}")
    if not inner.is_dir():
        raise ValueError(f"{source}, but {_what(inner)}; name an iteration that is there ({there}).")
    return inner


_GIVE = "give a folder that a run with --save or megatron-mtp convert has made"


def _what(path: Path) -> str:
    """Describe what is at a path where a folder is expected."""
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {os.readlink(path)}, which does not exist"
    return f"{path} is a file" if path.exists() else f"{path} does not exist"


def _whole_iterations(folder: Path) -> list[int]:
    numbers = [int(match.group(1)) for path in folder.glob("iter_*") if (match := _ITERATION.match(path.name))]
    return sorted(number for number in numbers if (folder / f"iter_{number:07d}" / FORMAT).exists())


def _named_in(folder: Path) -> list[str]:
    """Return valid contents of a tracker: the numbers of complete iterations, and `release`."""
    release = [RELEASE] if (folder / RELEASE / FORMAT).exists() else []
    return [*map(str, _whole_iterations(folder)), *release]


def another(inner: Path) -> str:
    """Suggest another complete iteration of the same folder instead of a damaged one, if there is one."""
    match = _ITERATION.match(inner.name)
    if match is None:
        return "give another checkpoint"
    others = [name for name in _named_in(inner.parent) if name != str(int(match.group(1)))]
    return f"give another iteration (whole: {', '.join(others)})" if others else "give another checkpoint"


def is_checkpoint(folder: Path) -> bool:
    """Return whether Megatron saves to this folder, or it is one iteration. It may be damaged, or lack its tracker."""
    own = any((folder / name).is_file() for name in (TRACKER, CATALOGUE, FORMAT))
    return own or bool(_named_in(folder))


def iteration_folder(folder: Path) -> Path:
    """Return the folder of an iteration's tensors: the given one, or one inside it.

    Raise ValueError if none is complete.
    """
    inner = folder if any((folder / name).is_file() for name in (CATALOGUE, FORMAT)) else named_iteration(folder)
    if any(inner.glob("mp_rank_*")):
        raise ValueError(
            f"{inner} has Megatron's older format, a file a rank; load it with megatron-mtp train, and save it with "
            "--ckpt-format torch_dist."
        )
    try:
        written = json.loads((inner / FORMAT).read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{inner / FORMAT} is missing, which is written last: the save was cut short, or is not of --ckpt-format "
            f"torch_dist; {another(inner)}."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{inner / FORMAT} cannot be read ({error}); {another(inner)}.") from None
    if not isinstance(written, dict) or written.get("sharded_backend") != "torch_dist":
        raise ValueError(f"{inner / FORMAT} does not name the format torch_dist; {another(inner)}.")
    return inner


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has tokenizer files."""
    return any(folder.glob("tokenizer*"))


def run_tokenizer(args: Namespace, checkpoint: Path) -> Path | None:
    """Return the tokenizer folder of the model in `checkpoint`, which holds all iterations; None if there is none.

    It is the checkpoint's copy, or the folder that the run was given, or the files that a conversion kept.
    """
    given = Path(getattr(args, "tokenizer_model", None) or os.devnull)
    copy, converted = checkpoint / KEPT_TOKENIZER, checkpoint / HF_FILES
    if copy.is_dir() or given.is_dir():
        return copy if copy.is_dir() else given
    return converted if has_tokenizer(converted) else None


def keep_tokenizer(args: Namespace, checkpoint: Path) -> None:
    """Copy a run's tokenizer next to the iterations of its checkpoint, unless an equal copy exists.

    A folder is copied without weights, and a SentencePiece model as `tokenizer.model`. A relative path in the arguments
    is made absolute.
    """
    source = Path(getattr(args, "tokenizer_model", None) or os.devnull)
    if source.is_dir():
        files = {file.name: file for file in without_weights(source)}
    elif source.is_file() and getattr(args, "tokenizer_type", None) in SENTENCE_PIECES:
        files = {"tokenizer.model": source}
    else:
        return
    args.tokenizer_model = str(source.resolve())
    target = checkpoint / KEPT_TOKENIZER
    if all((target / name).is_file() and filecmp.cmp(file, target / name, False) for name, file in files.items()):
        return
    with written_beside(target) as partial:
        partial.mkdir(parents=True)
        for name, file in files.items():
            shutil.copyfile(file, partial / name)
