"""The fork of one part.

python -m benchmarks.gpu.worker PART FOLDER SCRATCH SECONDS ADDRESS LINE [quick]
"""

import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import PARTS
from benchmarks.gpu import record as records
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.part import ON_CPU, NotRunError, Setting
from benchmarks.harness import Found, hardware


def main(name: str, folder: str, scratch: str, seconds: str, address: str, line: str, *quick: str) -> int:
    """Run the part and write its record; exit status 1 if it failed."""
    target, part, begun = Path(folder), PARTS[name], time.monotonic()
    record = records.read(target / f"{name}.json")

    def keep(found: Found) -> None:
        nonlocal record
        record = records.with_found(record, found)
        record["seconds"] = round(time.monotonic() - begun, 1)
        records.write(target, record)

    setting = Setting(name, bool(quick), Path(scratch), begun + float(seconds), Lines(address, line), keep)
    try:
        if why := part.missing(ON_CPU):
            raise NotRunError(why)
        record["hardware"] = hardware(ON_CPU) | {"on the CPU": ON_CPU}
        module, _, attribute = part.function.partition(":")
        keep(getattr(import_module(module), attribute)(setting, **part.given))
        record["status"] = "ran"
    except NotRunError as error:
        record |= {"status": "not run", "why": str(error)}
    except Exception as error:  # whatever a device has to say
        traceback.print_exc()
        record |= {"status": "failed", "why": f"{type(error).__name__}: {error}"[:500]}
    record["seconds"] = round(time.monotonic() - begun, 1)
    records.write(target, record)
    return int(record["status"] == "failed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
