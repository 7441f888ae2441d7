"""Run commands of megatron-mtp in forks of this process, which imports Megatron once for all of them."""

import os
import sys
from multiprocessing import get_context
from tempfile import TemporaryFile

from megatron_mtp.megatron.runtime import prepare

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a fork cannot use a device that its parent has initialized
prepare()


class VerbError(RuntimeError):
    """Raised if a verb fails, with the end of its output."""


def run(verb: str, *words: object) -> str:
    """Run a command and return its output. Raise VerbError if it fails."""
    import megatron_mtp.training.run  # noqa: F401  (once, before forking)

    given = [verb, *map(str, words)]
    with TemporaryFile("w+", errors="replace") as out, TemporaryFile("w+", errors="replace") as err:
        process = get_context("fork").Process(target=_be, args=(given, out.fileno(), err.fileno()))
        process.start()
        process.join()
        for file in (out, err):
            file.seek(0)
        printed = out.read()
        if process.exitcode:
            end = "\n".join((printed + err.read()).splitlines()[-40:])
            raise VerbError(f"megatron-mtp {' '.join(given)} ended with status {process.exitcode}:\n{end}")
    return printed


def _be(given: list[str], out: int, err: int) -> None:
    import torch

    from megatron_mtp.cli.main import main

    os.dup2(out, 1)
    os.dup2(err, 2)
    torch.set_num_threads(torch.get_num_threads())  # recreates torch's thread pool
    sys.exit(main(given))
