"""The process of one part.

python -m benchmarks.gpu.worker FUNCTION PART FOLDER SECONDS [quick]
"""

import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import record as records


def main(function: str, name: str, folder: str, seconds: str, *quick: str) -> int:
    """Run the part and write its record; exit status 1 if it failed."""
    from benchmarks.gpu.part import ON_CPU, NotRunError, Setting
    from benchmarks.harness import hardware

    target, record = Path(folder), records.read(Path(folder) / f"{name}.json")
    record["hardware"] = hardware(ON_CPU) | {"on the CPU": ON_CPU}
    begun = time.monotonic()

    def keep(found: object) -> None:
        nonlocal record
        record = records.with_found(record, found)
        record["seconds"] = round(time.monotonic() - begun, 1)
        records.write(target, record)

    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(bool(quick), Path(temporary), begun + float(seconds), keep)
        try:
            module, _, attribute = function.partition(":")
            keep(getattr(import_module(module), attribute)(setting))
            record["status"] = "ran"
        except NotRunError as why:
            record |= {"status": "not run", "why": str(why)}
        except Exception as error:  # whatever a device has to say
            traceback.print_exc()
            record |= {"status": "failed", "why": f"{type(error).__name__}: {error}"[:500]}
    record["seconds"] = round(time.monotonic() - begun, 1)
    records.write(target, record)
    return int(record["status"] == "failed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
