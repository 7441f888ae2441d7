"""`megatron-mtp doctor --kernels`: registers, occupancy and predicted time of the losses' kernels on other GPUs."""

import json
import os

from megatron_mtp.common.errors import sentences
from megatron_mtp.megatron.machine import why_not
from megatron_mtp.megatron.runtime import quieten


def main(arguments: list[str], program: str) -> int:
    """Compile and print; the only argument is --json.

    Without Triton, or with its interpreter, exits with one sentence and status 2.
    """
    with sentences(program):
        reason = why_not("triton")
        if reason is not None:
            raise ValueError(f"Triton compiles the kernels, and {reason}; run: pip install triton.")
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise ValueError("TRITON_INTERPRET is 1, so Triton interprets kernels and compiles none; unset it.")
        quieten()
        from megatron_mtp.extensions.kernels.tables import as_text, report

        found = report()
        print(json.dumps(found) if "--json" in arguments else as_text(found))
    return 0
