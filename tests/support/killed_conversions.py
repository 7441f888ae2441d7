"""Kill and resume conversions over and over until one finishes.

    python killed_conversions.py FOLDER KILLS SEED < JSON    [[COMMAND, [SOURCE, ...], FLAG, ...], ...]

Each command is killed KILLS times in FOLDER. Prints JSON: how many conversions finished after kills, and what was
wrong, per command.
"""

import json
import shutil
import sys
import threading
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from killing import Killer, files
from tqdm import tqdm

from megatron_mtp.checkpoint.convert.partial_folder import PLAN, RECORDS
from megatron_mtp.cli import convert
from megatron_mtp.megatron.runtime import quieten


def main(folder: Path, kills: int, seed: int, commands: list[Any]) -> dict[str, dict[str, object]]:
    quieten()
    tqdm.monitor_interval = 0  # its thread would not exist in a fork
    tqdm.set_lock(threading.RLock())  # the default lock is shared by all processes, and a killed one may hold it
    folder.mkdir()
    told: dict[str, dict[str, object]] = {}
    for verb, sources, *flags in commands:
        words = partial(words_of, verb, sources, flags)
        # Run once in this process, so that forks find lazy imports done. The thread has ended by the time it returns.
        assert convert.main([*words(folder / "first"), "--json"]) == 0
        killer = Killer(kills, Random(seed), folder / "log")
        told[verb] = kill(killer, words, folder)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return told


def words_of(verb: str, sources: list[str], flags: list[str], target: Path) -> list[str]:
    return [verb, *sources, str(target), "--workers", "1", "--resume", *flags]


def kill(killer: Killer, words: "partial[list[str]]", folder: Path) -> dict[str, object]:
    killer.measure(lambda: convert.main(words(folder / "whole")))
    whole = files(folder / "whole")
    wrong: list[str] = []
    number = 0
    while not killer.enough:
        number += 1
        target = folder / f"killed-{number}"
        while killer.end_or_kill(lambda target=target: convert.main(words(target))):  # type: ignore[misc]
            wrong += looks_whole_and_is_not(target, whole)
            if killer.enough:
                if (target / PLAN).exists() or not target.exists():
                    killer.end(lambda target=target: convert.main(words(target)))  # type: ignore[misc]
                break
            if target.exists() and not (target / PLAN).exists():  # it had finished before the kill
                break
        if files(target) != whole or target.with_name(f"{target.name}.partial").exists():
            wrong.append(f"{target.name} is not what a conversion writes that nobody kills")
        shutil.rmtree(target)
    return {"through": number, "killed": killer.done, "wrong": wrong}


def looks_whole_and_is_not(target: Path, whole: dict[str, bytes]) -> list[str]:
    """A folder under the final name must be complete, even if records of the conversion are still there."""
    if not target.exists():
        return []
    held = {
        name: content for name, content in files(target).items() if name != PLAN and not name.startswith(f"{RECORDS}/")
    }
    both = target.with_name(f"{target.name}.partial").exists()
    return [f"{target.name} holds {sorted(held)}, beside a partial one: {both}"] if held != whole or both else []


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.load(sys.stdin))))
