"""Conversions killed by SIGKILL at moments all over their time, then resumed, in children of a process without threads.

    python killed_conversions.py SOURCE FOLDER MOMENTS COMMAND [FLAGS]

Prints JSON: of each moment what was left, and whether the resumed conversion has written the same files.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from megatron_mtp.checkpoint import command as convert


def main(source: Path, folder: Path, moments: int, command: list[str]) -> list[dict[str, object]]:
    convert.quieten()
    import megatron_mtp.checkpoint.hf_form
    import megatron_mtp.checkpoint.megatron_args  # noqa: F401

    def start(target: Path, *more: str) -> int:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(convert.main([command[0], str(source), str(target), "--workers", "1", *command[1:], *more]))
        return child

    def finished(child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    started = time.monotonic()
    assert finished(start(folder / "whole")) == 0
    takes = time.monotonic() - started
    told = []
    for moment in range(moments):
        target = folder / f"killed-{moment}"
        child = start(target)
        time.sleep(takes * (moment + 0.5) / moments)
        os.kill(child, signal.SIGKILL)
        status = finished(child)
        left = target.exists(), target.with_name(f"{target.name}.partial").exists()
        status_again = 0 if left[0] and status == 0 else finished(start(target, "--resume"))
        told.append({"status": status, "target": left[0], "partial": left[1], "resumed": status_again,
                     "same": files(target) == files(folder / "whole"),
                     "rest": target.with_name(f"{target.name}.partial").exists()})  # fmt: skip
        shutil.rmtree(target, ignore_errors=True)
    return told


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
