"""The fork of one part.

python -m benchmarks.gpu.worker PART FOLDER SCRATCH SECONDS ADDRESS LINE [quick] [short]
"""

import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import PARTS, record
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.part import ON_CPU, NotRunError, Setting
from benchmarks.harness import Found, hardware


def main(name: str, folder: str, scratch: str, seconds: str, address: str, line: str, *sizes: str) -> int:
    """Run the part and write its record; exit status 1 if it failed."""
    part, begun = PARTS[name], time.monotonic()

    def update(**changes: object) -> None:
        record.update(Path(folder), name, **changes, seconds=round(time.monotonic() - begun, 1))

    def keep(found: Found) -> None:
        update(**found.as_dict(), **{"not run": found.not_run})

    own = Lines(address, line)
    setting = Setting(name, "quick" in sizes, Path(scratch), begun + float(seconds), own, keep, "short" in sizes)
    try:
        if why := part.missing(ON_CPU):
            raise NotRunError(why)
        update(hardware=hardware(ON_CPU) | {"on the CPU": ON_CPU})
        module, _, attribute = part.function.partition(":")
        keep(getattr(import_module(module), attribute)(setting, **part.given))
        update(status="ran")
    except NotRunError as error:
        update(status="not run", why=str(error))
    except Exception as error:  # the device may raise any type
        traceback.print_exc()
        update(status="failed", why=f"{type(error).__name__}: {error}"[:500])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
