"""Verbs of megatron-mtp in forks of this process, which imports Megatron once for all of them."""

import os
import sys
import traceback
from tempfile import TemporaryFile

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a fork cannot use a device that this process has started


class VerbError(RuntimeError):
    """A verb that failed, with the end of what it printed."""


def run(verb: str, *words: object) -> str:
    """What the verb prints; raises VerbError where it fails."""
    import torch

    from megatron_mtp.runtime import prepare

    prepare()
    import megatron_mtp.training.run  # noqa: F401  (once, before the fork)
    from megatron_mtp.cli.main import main

    sys.stdout.flush()
    with TemporaryFile() as out, TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                torch.set_num_threads(torch.get_num_threads())  # makes torch's pool anew
                status = main([verb, *map(str, words)])
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (out, err):
            file.seek(0)
        printed = out.read().decode(errors="replace")
        if status:
            end_of_log = "\n".join((printed + err.read().decode(errors="replace")).splitlines()[-40:])
            words_given = " ".join(map(str, words))
            raise VerbError(f"megatron-mtp {verb} {words_given} ended with status {status}:\n{end_of_log}")
    return printed
