"""Give damaged checkpoints to every verb that loads one, each in a fork of this process.

    python loading_cases.py FOLDER [--all]

With `--all` every fault is given to every verb that may meet it, otherwise to one of each kind. Prints JSON: {fault:
{verb: {"status": exit status, "error": stderr, "ran": whether planted code ran}}}.
"""

import json
import os
import pickle
import runpy
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_mtp.cli import main as cli
from megatron_mtp.megatron.runtime import prepare

warnings.filterwarnings("ignore")
prepare()

MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --mtp-num-layers 1 "
    "--mock-data --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 127 --eval-interval 100 --eval-iters 1"
).split()
STEP = "iter_0000002"
TRACKER = "latest_checkpointed_iteration.txt"
DATA = "__0_0.distcp"
OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"

Words = Callable[[Path], list[str]]
SCHEDULE = "--override-opt-param-scheduler"
TRAIN: dict[str, Words] = {
    "train": lambda folder: ["train", *MODEL, "--train-iters", "5", SCHEDULE, "--load", str(folder)],
    "train --finetune": lambda folder: ["train", *MODEL, "--train-iters", "1", "--finetune", "--load", str(folder)],
    "train --pretrained-checkpoint": lambda folder: [
        *("train", *MODEL, "--train-iters", "1", "--pretrained-checkpoint", str(folder))
    ],
    "train --use-checkpoint-args": lambda folder: [
        *("train", *MODEL, "--train-iters", "5", SCHEDULE, "--use-checkpoint-args", "--load", str(folder))
    ],
}
READ: dict[str, Words] = {
    "evaluate": lambda folder: ["evaluate", "--mock-data", "--eval-iters", "1", "--load", str(folder)],
    "generate": lambda folder: ["generate", "--prompt-ids", "1,2", "--max-new-tokens", "2", "--load", str(folder)],
    "inspect": lambda folder: ["convert", "inspect", str(folder)],
    "mcore-to-hf": lambda folder: ["convert", "mcore-to-hf", str(folder), str(folder.with_name("hf"))],
    "drop-mtp": lambda folder: ["convert", "drop-mtp", str(folder), str(folder.with_name("dropped"))],
    "gpt-to-hybrid": lambda folder: ["convert", "gpt-to-hybrid", str(folder), str(folder.with_name("hybrid"))],
}
REST: dict[str, Words] = {
    "inspect --check": lambda folder: ["convert", "inspect", "--check", str(folder)],
    "verify": lambda folder: ["convert", "verify", str(folder.parents[1] / "hf"), str(folder)],
    "attach-mtp": lambda folder: [
        *("convert", "attach-mtp", str(folder), str(folder.with_name("attached")), "--mtp-num-layers", "1")
    ],
    "own_loop": lambda folder: ["own_loop", str(folder)],
}
EVERY = {**TRAIN, **READ, **REST}
OF_MEGATRON = {**TRAIN, "evaluate": READ["evaluate"]}
"""Verbs that load with Megatron's own function."""

READERS = ("train", "generate", "inspect", "own_loop")
"""One verb for each loading function."""

FURTHER = {"pickle: .metadata": ["train --pretrained-checkpoint", "inspect --check"]}
"""Additional places that read the metadata."""


class Planted:
    """Write a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.mark,)


def plant_bytes(file: Path, mark: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(pickle.dumps(Planted(mark)))


def plant_object(file: Path, mark: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    torch.save({"args": Planted(mark)}, file)


def plant_entries(folder: Path, mark: Path, common: bool) -> None:
    """Replace entries that are not tensors: the arguments, or all others, which only Megatron reads."""
    catalogue = folder / STEP / ".metadata"
    metadata = pickle.loads(catalogue.read_bytes())
    with open(folder / STEP / DATA, "ab") as stream:
        start = stream.tell()
        torch.save([Planted(mark)], stream)
        for index, place in metadata.storage_data.items():
            no_tensor = type(metadata.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata"
            if no_tensor and index.fqn.startswith("common_state") == common:
                place.offset, place.length = start, stream.tell() - start
                place.__dict__.pop("crc32", None)
    catalogue.write_bytes(pickle.dumps(metadata))
    (folder / STEP / "checksums.json").unlink(missing_ok=True)


def older(folder: Path) -> Path:
    """Replace the distributed checkpoint with one in Megatron's older format. Return the file of its rank."""
    shutil.rmtree(folder / STEP)
    (folder / STEP / "mp_rank_00").mkdir(parents=True)
    return folder / STEP / "mp_rank_00" / "model_optim_rng.pt"


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path, place: float = 0.3) -> None:
    data = bytearray(file.read_bytes())
    start = int(len(data) * place)
    data[start : start + 64] = bytes(byte ^ 0xFF for byte in data[start : start + 64])
    file.write_bytes(bytes(data))


def link_to_nowhere(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to("/nowhere/at/all")


def in_place(folder: Path, kind: str) -> None:
    shutil.rmtree(folder)
    if kind == "file":
        folder.write_text("")
    elif kind == "folder":
        folder.mkdir()


Fault = Callable[[Path], object]
MARK = Path(tempfile.gettempdir()) / f"planted-{os.getpid()}"
PLANTED: dict[str, tuple[Fault, dict[str, Words]]] = {
    "pickle: .metadata": (lambda folder: plant_bytes(folder / STEP / ".metadata", MARK), EVERY),
    "pickle: common.pt": (lambda folder: plant_object(folder / STEP / "common.pt", MARK), EVERY),
    "pickle: arguments in .distcp": (lambda folder: plant_entries(folder, MARK, common=True), EVERY),
    "pickle: objects in .distcp": (lambda folder: plant_entries(folder, MARK, common=False), OF_MEGATRON),
    "pickle: .distcp": (lambda folder: plant_bytes(folder / STEP / DATA, MARK), EVERY),
    "pickle: metadata.json": (lambda folder: plant_bytes(folder / STEP / "metadata.json", MARK), EVERY),
    "pickle: tracker": (lambda folder: plant_bytes(folder / TRACKER, MARK), EVERY),
    "pickle: older format": (lambda folder: plant_object(older(folder), MARK), EVERY),
    "bare pickle: older format": (lambda folder: plant_bytes(older(folder), MARK), TRAIN),
}
TENSORS_READ = {name: words for name, words in EVERY.items() if name not in ("inspect", "own_loop")}
SOME = {name: EVERY[name] for name in ("train", "generate")}
DAMAGED: dict[str, tuple[Fault, dict[str, Words], str]] = {
    ".distcp cut": (lambda folder: halve(folder / STEP / DATA), SOME, "train"),
    ".distcp missing": (lambda folder: (folder / STEP / DATA).unlink(), SOME, "generate"),
    ".distcp a dangling link": (lambda folder: link_to_nowhere(folder / STEP / DATA), SOME, "generate"),
    ".distcp flipped": (lambda folder: flip(folder / STEP / DATA), TENSORS_READ, "train, inspect --check"),
    ".metadata cut": (lambda folder: halve(folder / STEP / ".metadata"), SOME, "train"),
    ".metadata missing": (lambda folder: (folder / STEP / ".metadata").unlink(), SOME, "generate"),
    ".metadata flipped": (lambda folder: flip(folder / STEP / ".metadata", 0.9), SOME, "train"),
    "metadata.json cut": (lambda folder: halve(folder / STEP / "metadata.json"), SOME, "generate"),
    "metadata.json missing": (lambda folder: (folder / STEP / "metadata.json").unlink(), SOME, "train"),
    "metadata.json a list": (lambda folder: (folder / STEP / "metadata.json").write_text("[1]"), SOME, "generate"),
    "common.pt junk": (lambda folder: (folder / STEP / "common.pt").write_text("junk"), SOME, "train"),
    "tracker junk": (lambda folder: (folder / TRACKER).write_text("junk"), SOME, "train"),
    "tracker binary": (lambda folder: (folder / TRACKER).write_bytes(b"\xff\xfe\0"), SOME, "generate"),
    "tracker negative": (lambda folder: (folder / TRACKER).write_text("-3"), SOME, "generate"),
    "tracker to nowhere": (lambda folder: (folder / TRACKER).write_text("7"), SOME, "train, generate"),
    "missing": (lambda folder: in_place(folder, "nothing"), {**READ, **TRAIN}, "evaluate"),
    "a dangling link": (link_to_nowhere, SOME, "train"),
    "a file": (lambda folder: in_place(folder, "file"), SOME, "generate"),
    "an empty folder": (lambda folder: in_place(folder, "folder"), SOME, "generate"),
    "older format junk": (lambda folder: older(folder).write_text("junk"), SOME, "train"),
    "older format without files": (older, SOME, "generate"),
}
"""Faults, the verbs that they are given to, and those of the first tier."""


def train(folder: Path, *flags: str) -> list[str]:
    return ["train", *MODEL, *flags, "--load", str(folder)]


def moved(folder: Path) -> None:
    shutil.rmtree(folder)


OWN: dict[str, tuple[Fault, dict[str, Words]]] = {
    "nothing there": (
        moved,
        {
            "--save is --load": lambda folder: train(
                folder, "--save", str(folder), "--save-interval", "9", "--train-iters", "1"
            ),
            "--save is another": lambda folder: train(
                folder, "--save", f"{folder}-new", "--save-interval", "9", "--train-iters", "1"
            ),
            "--mtp-init": lambda folder: train(
                folder, "--save", str(folder), "--save-interval", "9", "--mtp-init", "random", "--train-iters", "1"
            ),
            "--skip-train": lambda folder: train(
                folder, "--save", str(folder), "--save-interval", "9", "--skip-train", "--train-iters", "1"
            ),
        },
    ),
    "whole": (
        lambda folder: None,
        {
            "as it is": EVERY["train"],
            "inspect --check": EVERY["inspect --check"],
            "--ckpt-step to nowhere": lambda folder: train(folder, "--ckpt-step", "9", "--train-iters", "1"),
            "distributed optimizer": lambda folder: train(folder, "--use-distributed-optimizer", "--train-iters", "5"),
            "--no-load-optim": lambda folder: train(
                folder, "--use-distributed-optimizer", "--no-load-optim", "--train-iters", "5", SCHEDULE
            ),
            "other positions": lambda folder: train(folder, "--rotary-base", "500000", "--train-iters", "5", SCHEDULE),
            "a new run with other positions": lambda folder: train(
                folder, "--rotary-base", "500000", "--train-iters", "5", "--finetune"
            ),
            "another rate": lambda folder: train(folder, "--train-iters", "5", "--lr", "2e-3", SCHEDULE),
            "another rate by default": lambda folder: train(folder, "--train-iters", "2", "--lr", "2e-3"),
            "longer schedule": lambda folder: train(folder, "--train-iters", "9"),
            "another model": lambda folder: train(folder, "--num-layers", "2", "--train-iters", "5", SCHEDULE),
        },
    ),
    "of a distributed optimizer": (
        lambda folder: (shutil.rmtree(folder), shutil.copytree(folder.parents[1] / "sharded", folder)),
        {"as it is": EVERY["train"], "--no-load-optim": lambda folder: [*EVERY["train"](folder), "--no-load-optim"]},
    ),
    "without checksums": (lambda folder: forget_checksums(folder), {"as it is": EVERY["train"]}),
    "saved again by another program": (
        lambda folder: save_again(folder),
        {"as it is": EVERY["train"]},
    ),
}


def forget_checksums(folder: Path) -> None:
    catalogue = folder / STEP / ".metadata"
    metadata = pickle.loads(catalogue.read_bytes())
    for place in metadata.storage_data.values():
        place.__dict__.pop("crc32", None)
    catalogue.write_bytes(pickle.dumps(metadata))
    (folder / STEP / "checksums.json").unlink()


def save_again(folder: Path) -> None:
    """Save again as Megatron without this package would, and keep the file with the old checksums."""
    left = (folder / STEP / "checksums.json").read_text()
    forget_checksums(folder)
    catalogue = folder / STEP / ".metadata"
    metadata = pickle.loads(catalogue.read_bytes())
    metadata.storage_meta.save_id = "another"
    catalogue.write_bytes(pickle.dumps(metadata))
    (folder / STEP / "checksums.json").write_text(left)


def run(words: list[str]) -> int | None:
    if words[0] == "own_loop":
        runpy.run_path(str(OWN_LOOP))["main"](Path(words[1]), 1)
        return 0
    return cli.main(words)


def forked(words: list[str], limit: int = 120) -> dict[str, object]:
    """Run a command in a fork."""
    MARK.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(errors.fileno(), 2)
                import signal

                signal.alarm(limit)
                status = run(words) or 0
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        said = errors.read()
    ran = MARK.exists()
    MARK.unlink(missing_ok=True)
    return {"status": status, "error": said[-4000:], "ran": ran}


def tried(every: bool) -> dict[str, tuple[Fault, dict[str, Words]]]:
    """Return faults with the verbs that they are given to."""
    chosen = {fault: (damage, verbs, [*READERS, *FURTHER.get(fault, ())]) for fault, (damage, verbs) in PLANTED.items()}
    chosen |= {fault: (damage, verbs, first.split(", ")) for fault, (damage, verbs, first) in DAMAGED.items()}
    return OWN | {
        fault: (damage, {verb: words for verb, words in verbs.items() if every or verb in first})
        for fault, (damage, verbs, first) in chosen.items()
    }


def main(scratch: Path, every: bool) -> dict[str, dict[str, dict[str, object]]]:
    made = scratch / "made"
    saved = ["train", *MODEL, "--train-iters", "2", "--save", str(made), "--save-interval", "2"]
    sharded = [*saved, "--use-distributed-optimizer", "--save", str(scratch / "sharded")]
    sharded += ["--async-save", "--async-strategy", "mcore"]
    for words in (saved, sharded, ["convert", "mcore-to-hf", str(made), str(scratch / "hf")]):
        done = forked(words)
        assert done["status"] == 0, done["error"]
    for folder in (made, scratch / "sharded"):
        places = pickle.loads((folder / STEP / ".metadata").read_bytes()).storage_data.values()
        assert all(hasattr(place, "crc32") for place in places), f"{folder} lacks checksums"
        assert (folder / STEP / "checksums.json").exists()
    told: dict[str, dict[str, dict[str, object]]] = {}
    for fault, (damage, verbs) in tried(every).items():
        for verb, words in verbs.items():
            place = scratch / "case" / "checkpoint"
            shutil.rmtree(place.parent, ignore_errors=True)
            shutil.copytree(made, place)
            damage(place)
            told.setdefault(fault, {})[verb] = forked(words(place))
    return told


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), "--all" in sys.argv)))
