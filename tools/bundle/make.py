"""A folder of wheels, from which `scripts/setup.sh --bundle` installs on a machine that reaches no package registry.

    python tools/bundle/make.py DIR [--have FILE] [--extras te,energy] [--add WHEEL] [--parts SIZE]

In:  constraints.txt, one exact version a line, and EXTRAS, the files of versions that an extra adds.
Out: DIR with the wheels, SHA256SUMS and `target`, which says for which Python and machine; with --parts also DIR.parts.

All is written to DIR.partial, every wheel into a folder of its own and renamed when pip has checked it; DIR.partial is
renamed last. So what has its final name is whole, and a run after a kill fetches only what is missing.
Plain Python: nothing of the project has to be installed.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
EXTRAS = {file.stem: file for file in sorted(HERE.glob("*.txt"))}
SUMS, TARGET = "SHA256SUMS", "target"
GLIBC = 28
"""Wheels for glibc 2.5 to 2.GLIBC are taken: RHEL 8, Debian 11 and Ubuntu 20.04 are the oldest systems that have it."""

AT_ONCE = 4
"""Downloads at once."""

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
EXAMPLES = """examples:
  scripts/bundle.sh bundle                                  what scripts/setup.sh installs, for a machine like this
  scripts/bundle.sh bundle --parts 2G                       the same, and in bundle.parts as files of 2 GiB
  scripts/bundle.sh bundle --have target.freeze                without what the target has: there,
                                                            `python3 -m pip list --format freeze > target.freeze`
  scripts/bundle.sh bundle --extras te --add wheels/transformer_engine_torch-2.11.0-cp312-cp312-linux_x86_64.whl
"""

Pins = dict[str, str]
"""Versions by normalised names."""


class RefusedError(ValueError):
    """A user's mistake; its message is one sentence."""


@dataclass(frozen=True)
class Wheel:
    """What the name of a wheel's file says."""

    name: str
    version: str
    pythons: tuple[str, ...]
    abis: tuple[str, ...]
    machines: tuple[str, ...]

    @staticmethod
    def of(file: Path) -> "Wheel":
        """Raises RefusedError where the file's name is not a wheel's."""
        words = file.name.removesuffix(".whl").split("-")
        if file.suffix != ".whl" or len(words) not in (5, 6):
            raise RefusedError(f"{file} is not named like a wheel; give a file NAME-VERSION-PYTHON-ABI-PLATFORM.whl.")
        tags = (tuple(word.split(".")) for word in words[-3:])
        return Wheel(normalised(words[0]), words[1], *tags)

    def fits(self, python: str, machine: str) -> bool:
        """Whether it installs on CPython `python`, such as 3.12, under Linux on `machine`."""
        minor = int(python.split(".")[1])
        own = f"cp3{minor}" in self.pythons and ({f"cp3{minor}", "abi3", "none"} & set(self.abis))
        stable = "abi3" in self.abis and any(_minor(tag) <= minor for tag in self.pythons if tag.startswith("cp3"))
        pure = "py3" in self.pythons and "none" in self.abis
        return bool(own or stable or pure) and any(
            kind == "any" or kind.endswith(f"linux_{machine}") or re.fullmatch(rf"manylinux\w*_{machine}", kind)
            for kind in self.machines
        )


def _minor(tag: str) -> int:
    return int(tag.removeprefix("cp3") or 0)


def main(words: list[str]) -> int:
    """Make the bundle; the exit status."""
    given = parser().parse_args(words)
    try:
        folder = Path(given.dir)
        wanted = wanted_pins(given.have, given.extras)
        added = added_wheels(given.add, wanted, given.python, given.machine)
        size = None if given.parts is None else bytes_of(given.parts)
        make(folder, wanted, added, target_of(given))
        if size is not None:
            cut(folder, size)
    except RefusedError as error:
        print(f"bundle.sh: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bundle.sh: error: '{error.filename}' cannot be used ({error.strerror}).", file=sys.stderr)
        return 2
    return 0


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        sys.exit(print(f"bundle.sh: error: {message} (--help lists the flags)", file=sys.stderr) or 2)


def parser() -> argparse.ArgumentParser:
    """All flags."""
    flags = Parser(
        "bundle.sh", description=__doc__.split("\n")[0], epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    flags.add_argument("dir", metavar="DIR", help="the folder to make; a run that was stopped goes on in DIR.partial")
    flags.add_argument("--have", metavar="FILE", type=Path, help="`pip list --format freeze` of the target machine")
    flags.add_argument("--extras", metavar="NAMES", default="", help=f"of {', '.join(EXTRAS)}, joined by commas")
    flags.add_argument("--add", metavar="WHEEL", type=Path, action="append", default=[], help="a wheel built elsewhere")
    flags.add_argument("--parts", metavar="SIZE", help="also cut into DIR.parts, such as 48M or 2G a file")
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    flags.add_argument("--python", default=running, choices=["3.12", "3.13", "3.14"], help="Python of the target")
    flags.add_argument("--machine", default=platform.machine(), choices=["x86_64", "aarch64"], help="the target's CPU")
    return flags


def target_of(given: argparse.Namespace) -> str:
    """The text of `target`: what setup.sh has to know of the bundle."""
    site = "no" if given.have is None else "yes"
    return f"python {given.python}\nmachine {given.machine}\nsite-packages {site}\nextras {given.extras}\n"


def wanted_pins(have: Path | None, extras: str) -> Pins:
    """Every version of constraints.txt and of the extras that the target lacks; build requirements whether or not.

    Raises:
        RefusedError: an extra or a line of `have` is none, or constraints.txt does not allow a version there.
    """
    wanted = pins_of(ROOT / "constraints.txt")
    for name in filter(None, extras.split(",")):
        if name not in EXTRAS:
            raise RefusedError(f"--extras is {extras}, and '{name}' is no extra; give some of {', '.join(EXTRAS)}.")
        wanted |= pins_of(EXTRAS[name])
    wanted.pop("pip", None)  # every virtual environment has its own
    if have is None:
        return wanted
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    built_with = {normalised(re.split(r"[^\w.-]", line)[0]) for line in project["build-system"]["requires"]}
    for name, version in pins_of(have).items():
        if name in wanted and version.partition("+")[0] != wanted[name]:
            raise RefusedError(
                f"--have {have} has {name} {version}, and constraints.txt allows {wanted[name]} alone; delete that "
                "line, and the bundle brings its own."
            )
        if name not in built_with:  # they are installed apart from all others
            wanted.pop(name, None)
    return wanted


def pins_of(file: Path) -> Pins:
    """Raises RefusedError at a line that is not NAME==VERSION."""
    if not file.is_file():
        raise RefusedError(f"{file} is not there; give a file of lines NAME==VERSION (`pip list --format freeze`).")
    pins = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not (line := line.partition("#")[0].strip()):
            continue
        if (found := re.fullmatch(r"([\w.-]+)==([\w.+!-]+)", line)) is None:
            raise RefusedError(
                f"{file}: line {number} is '{line}'; give lines NAME==VERSION (`pip list --format freeze`)."
            )
        pins[normalised(found[1])] = found[2]
    return pins


def normalised(name: str) -> str:
    """PEP 503's form of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def added_wheels(files: list[Path], wanted: Pins, python: str, machine: str) -> dict[Path, Wheel]:
    """The wheels of --add.

    Raises:
        RefusedError: one is absent, for another Python or machine, or not a version that the bundle is to have.
    """
    added = {}
    for file in files:
        if not file.is_file():
            raise RefusedError(f"--add {file} is not there; give a wheel.")
        added[file] = wheel = Wheel.of(file)
        if not wheel.fits(python, machine):
            raise RefusedError(
                f"--add {file.name} is not for Python {python} on {machine}; build it there, or give --python and "
                "--machine."
            )
        if wanted.get(wheel.name) != wheel.version.partition("+")[0]:
            known = wanted.get(wheel.name, "no such package: add it to constraints.txt, or name its extra")
            raise RefusedError(f"--add {file.name} has version {wheel.version}, and the bundle wants {known}.")
    return added


def make(folder: Path, wanted: Pins, added: dict[Path, Wheel], target: str) -> None:
    """Fill `folder`.

    Raises:
        RefusedError: the folder is no bundle, or some versions have no wheel for the target.
    """
    partial = _beside(folder, ".partial")
    _enter(folder, partial)
    here = _whole_wheels(partial)
    for file, wheel in added.items():
        if here.pop(wheel.name, None) is not None:  # of an earlier run: the given one counts
            _remove(partial, wheel.name)
        shutil.copy(file, partial / "adding")
        (partial / "adding").rename(partial / file.name)
        here[wheel.name] = wheel.version
    for name in [name for name, version in here.items() if wanted.get(name) != version.partition("+")[0]]:
        _remove(partial, name)
        here.pop(name)
    lacking = {name: version for name, version in wanted.items() if name not in here}
    print(f"bundle: {len(wanted)} wheels, {len(lacking)} to fetch", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        fetched = pool.map(lambda name: _fetch(name, lacking[name], partial, target), lacking)
        absent = [said for said in fetched if said is not None]
    if absent:
        raise RefusedError(
            f"no wheel was found of {', '.join(absent)}; run this again if a download failed, or, where only a source "
            "distribution exists, build it elsewhere (`pip wheel --no-deps --no-build-isolation`) and give it with "
            f"--add WHEEL (what was fetched is kept in {partial})."
        )
    wheels = sorted(partial.glob("*.whl"))
    (partial / TARGET).write_text(target)
    (partial / SUMS).write_text("".join(f"{_sum(file)}  {file.name}\n" for file in [*wheels, partial / TARGET]))
    size = sum(file.stat().st_size for file in wheels) / 2**20
    partial.rename(folder)
    print(f"bundle: {folder}: {len(wheels)} wheels, {size:,.1f} MiB")


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(folder.absolute().name + ending)


def _enter(folder: Path, partial: Path) -> None:
    """Make `partial`, from an earlier bundle if there is one."""
    if folder.exists() and not (folder / SUMS).is_file():
        raise RefusedError(f"{folder} is there, and is no bundle; name a folder that is not there.")
    if folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        folder.rename(partial)
    partial.mkdir(parents=True, exist_ok=True)
    for rest in partial.glob(".fetching-*"):
        shutil.rmtree(rest)


def _whole_wheels(partial: Path) -> Pins:
    """Names and versions of what is there; what an earlier bundle says to be damaged is removed."""
    known = dict(line.split()[::-1] for line in (partial / SUMS).read_text().splitlines()) if _has(partial) else {}
    (partial / SUMS).unlink(missing_ok=True)
    for file in partial.glob("*.whl"):
        if file.name in known and known[file.name] != _sum(file):
            print(f"bundle: {file.name} is damaged, and is fetched again")
            file.unlink()
    wheels = map(Wheel.of, partial.glob("*.whl"))
    return {wheel.name: wheel.version for wheel in wheels}


def _has(partial: Path) -> bool:
    return (partial / SUMS).is_file()


def _remove(partial: Path, name: str) -> None:
    for file in partial.glob("*.whl"):
        if Wheel.of(file).name == name:
            file.unlink()


def _fetch(name: str, version: str, partial: Path, target: str) -> str | None:
    """A wheel by pip, which compares it with the index's checksum; what is lacking, or None."""
    python, machine = (line.split()[1] for line in target.splitlines()[:2])
    own = partial / f".fetching-{name}"
    own.mkdir()
    kinds = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    kinds += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(own)]
    command += [word for kind in kinds for word in ("--platform", kind)]
    done = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True)
    if done.returncode == 0:
        (wheel,) = own.glob("*.whl")
        wheel.rename(partial / wheel.name)
    shutil.rmtree(own)
    return None if done.returncode == 0 else f"{name} {version}"


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def bytes_of(size: str) -> int:
    """Raises RefusedError where it is not a number of bytes, with K, M or G."""
    found = re.fullmatch(r"(\d+)([KMG]?)", size)
    if found is None or not int(found[1]):
        raise RefusedError(f"--parts is {size}; give a size such as 48M or 2G.")
    return int(found[1]) * UNITS[found[2]]


def cut(folder: Path, size: int) -> None:
    """Write DIR.parts: a tar of the folder in files of `size` bytes and their checksums, for join_bundle.sh."""
    parts, partial = _beside(folder, ".parts"), _beside(folder, ".parts.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tar = "tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - ."  # the same bytes every time
    subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'{tar} | split -b {size} -d -a 4 - "$1"/part-', "bash", partial.absolute()],
        cwd=folder,
        check=True,
    )
    files = sorted(partial.glob("part-*"))
    (partial / SUMS).write_text("".join(f"{_sum(file)}  {file.name}\n" for file in files))
    shutil.rmtree(parts, ignore_errors=True)
    partial.rename(parts)
    print(f"bundle: {parts}: {len(files)} parts; scripts/join_bundle.sh joins them on the target")


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(sys.argv[1:]))
