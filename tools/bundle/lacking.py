"""Which versions that this checkout needs are neither in a bundle nor installed: setup.sh asks before it installs.

.venv/bin/python tools/bundle/lacking.py DIR EXTRAS     prints NAME VERSION, joined by commas, or nothing
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from make import Wheel, wanted_pins


def lacking(folder: Path, extras: str) -> list[str]:
    """NAME VERSION of everything that `folder` has no wheel of and this Python does not find."""
    wheels = {wheel.name: wheel.version for wheel in map(Wheel.of, folder.glob("*.whl"))}
    wanted = wanted_pins(None, extras).items()
    return [f"{name} {pin}" for name, pin in wanted if pin not in _public(wheels.get(name), _installed(name))]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _public(*versions: str | None) -> list[str]:
    """Without the local part, as in 2.11.0+cu130."""
    return [found.partition("+")[0] for found in versions if found is not None]


if __name__ == "__main__":
    print(", ".join(lacking(Path(sys.argv[1]), sys.argv[2])))
