"""Bundles of wheels, for a project of two packages whose index is a folder: nothing here needs a network.

`bundle.sh` makes one, `setup.sh --bundle` installs from it alone, `join_bundle.sh` joins its parts.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import getsource
from pathlib import Path
from threading import Event, Thread
from zipfile import ZipFile

import pytest
from documents import ROOT

PROJECT = """
[build-system]
requires = ["beta"]
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny"
version = "1"
dependencies = ["alpha"]

[project.optional-dependencies]
te = ["gamma"]
dev = []
"""


def wheel(folder: Path | str, name: str, version: str, needs: str = "", tags: str = "py3-none-any") -> Path:
    """A package of one empty module."""
    about, info = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", f"{name}-{version}.dist-info"
    file = Path(folder) / f"{name}-{version}-{tags}.whl"
    with ZipFile(file, "w") as opened:
        opened.writestr(f"{name}.py", "")
        opened.writestr(f"{info}/METADATA", about + (f"Requires-Dist: {needs}\n" if needs else ""))
        opened.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n")
        opened.writestr(f"{info}/RECORD", "")
    return file


BACKEND = f"""
import beta
from pathlib import Path
from zipfile import ZipFile

{getsource(wheel)}

def build_editable(folder, *_):
    return wheel(folder, "tiny", "1", "alpha").name
"""
"""What builds the project imports beta, which the bundle has to have for that."""


class Place:
    """A checkout of the tiny project, an index of its wheels and what the scripts said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkout, self.index = folder, folder / "checkout", folder / "index"
        self.bundle = folder / "bundle"
        for name in ("bundle", "setup", "join_bundle", "find_python"):
            self.copy(f"scripts/{name}.sh")
        for file in (ROOT / "tools/bundle").glob("*.*"):
            self.copy(f"tools/bundle/{file.name}")
        (self.checkout / "tools/bundle/te.txt").write_text("gamma==3.0\n")
        (self.checkout / "pyproject.toml").write_text(PROJECT)
        (self.checkout / "constraints.txt").write_text("# tested with\nalpha==1.0\nBeta==2.0\npip==23.2.1\n")
        (self.checkout / "backend.py").write_text(BACKEND)
        self.index.mkdir()
        for name, version in (("alpha", "1.0"), ("alpha", "1.1"), ("beta", "2.0")):
            wheel(self.index, name, version)

    def copy(self, name: str) -> None:
        (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, self.checkout / name)

    def environment(self, links: str = "") -> dict[str, str]:
        path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.folder), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": links or str(self.index)}

    def run(self, script: str, *words: str | Path, status: int = 0) -> str:
        """What a script of the checkout printed, on stderr where it is to fail, which must be one sentence then."""
        command = ["bash", f"scripts/{script}", *words]
        done = subprocess.run(
            command, cwd=self.checkout, env=self.environment(), capture_output=True, text=True, timeout=500
        )
        assert done.returncode == status, done.stdout + done.stderr
        if status:
            assert done.stderr.count("\n") == 1, done.stderr
            assert "error: " in done.stderr
            return done.stderr
        return done.stdout

    def wheels(self) -> list[str]:
        return sorted(file.name for file in self.bundle.glob("*.whl"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


ALPHA, BETA = "alpha-1.0-py3-none-any.whl", "beta-2.0-py3-none-any.whl"


@pytest.mark.matrix
def test_a_checkout_installs_from_a_bundle_alone(place: Place) -> None:
    """From the bundle's wheels, not from an index that pip is set up with; and a wheel left out is named."""
    place.run("bundle.sh", place.bundle)
    assert place.wheels() == [ALPHA, BETA]
    shutil.copytree(place.bundle, place.folder / "less")
    (place.folder / "less" / ALPHA).unlink()
    sums = place.folder / "less" / "SHA256SUMS"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if ALPHA not in line))
    said = place.run("setup.sh", "--bundle", place.folder / "less", status=2)
    assert f"neither {place.folder}/less nor this machine has alpha 1.0; make the bundle" in said
    assert not (place.checkout / ".venv" / "installed").exists()
    assert "setup: done" in place.run("setup.sh", "--bundle", place.bundle)
    python = place.checkout / ".venv/bin/python"
    found = subprocess.run(
        [python, "-c", "import alpha, tiny; print(alpha.__file__)"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(str(place.checkout / ".venv"))
    assert place.run("setup.sh", "--bundle", place.bundle) == place.run("setup.sh") == "", "all is there"


def test_what_the_target_has_is_left_out(place: Place) -> None:
    """But not what builds the project, which pip installs apart."""
    (have := place.folder / "have").write_text("Alpha==1.0+cu130\nbeta==2.0\nother==9\n")
    place.run("bundle.sh", place.bundle, "--have", have)
    assert place.wheels() == [BETA]
    assert "site-packages yes" in (place.bundle / "target").read_text()
    have.write_text("alpha==1.1\n")
    said = place.run("bundle.sh", place.folder / "other", "--have", have, status=2)
    assert "alpha 1.1, and constraints.txt allows 1.0 alone; delete that line" in said
    place.run("bundle.sh", place.bundle)
    assert place.wheels() == [ALPHA, BETA], "the folder was made anew, for a target that has nothing"


def test_a_wheel_that_no_index_has_is_added(place: Place) -> None:
    said = place.run("bundle.sh", place.bundle, "--extras", "te", status=2)
    assert said.startswith("bundle.sh: error: no wheel was found of gamma 3.0; ")
    assert "--add WHEEL" in said
    assert not place.bundle.exists()
    machine = os.uname().machine
    for tags in ("cp311-cp311-linux_" + machine, "cp312-cp312-linux_other", "cp314-abi3-linux_" + machine):
        built = wheel(place.folder, "gamma", "3.0", tags=tags)
        options = ("--extras", "te", "--python", "3.12", "--add")
        assert f"{built.name} is not for Python 3.12" in place.run("bundle.sh", place.bundle, *options, built, status=2)
    built = wheel(place.folder, "gamma", "3.0", tags=f"cp312-cp312-linux_{machine}")
    place.run("bundle.sh", place.bundle, *options, built)
    assert place.wheels() == [ALPHA, BETA, built.name]
    assert "extras te\n" in (place.bundle / "target").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "the following arguments are required: DIR"),
        (("new", "--have", "nowhere"), "nowhere is not there"),
        (("new", "--have", "backend.py"), "backend.py: line 2 is 'import beta'; give lines NAME==VERSION"),
        (("new", "--extras", "te,tee"), "'tee' is no extra; give some of energy, te."),
        (("new", "--parts", "2 GB"), "--parts is 2 GB; give a size such as 48M or 2G."),
        (("new", "--add", "beta.whl"), "--add beta.whl is not there"),
        (("new", "--add", "backend.py"), "backend.py is not named like a wheel"),
        (("scripts",), "scripts is there, and is no bundle"),
        (("new", "--size", "3"), "unrecognized arguments: --size 3"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], says: str, place: Place) -> None:
    assert says in place.run("bundle.sh", *words, status=2)
    assert not (place.checkout / "new").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--bundle",), "the arguments are '--bundle'; give none, --help, or --bundle DIR."),
        (("--bundle", "nowhere"), "--bundle nowhere is no folder"),
        (("--bundle", "scripts"), "is not a whole bundle"),
    ],
)
def test_what_is_no_bundle_is_not_installed(words: tuple[str, ...], says: str, place: Place) -> None:
    assert says in place.run("setup.sh", *words, status=2)


def test_damage_and_other_machines_are_seen_before_anything_is_installed(place: Place) -> None:
    place.run("bundle.sh", place.bundle, "--python", "3.14", "--machine", os.uname().machine)
    (place.bundle / ALPHA).write_bytes(b"")
    said = place.run("setup.sh", "--bundle", place.bundle, status=2)
    assert f"these are damaged or missing: {ALPHA}; copy them again." in said
    place.run("bundle.sh", place.bundle, "--python", "3.14", "--machine", "aarch64")
    assert (place.bundle / ALPHA).stat().st_size, "the damaged one was fetched again"
    if os.uname().machine != "aarch64":
        assert "is for aarch64, and this machine is" in place.run("setup.sh", "--bundle", place.bundle, status=2)
    target = place.bundle / "target"
    target.write_text(f"python 3.99\nmachine {os.uname().machine}\n")
    sums = (place.bundle / "SHA256SUMS").read_text().splitlines(True)
    (place.bundle / "SHA256SUMS").write_text("".join(line for line in sums if "target" not in line))
    assert "is for Python 3.99, which was not found here" in place.run("setup.sh", "--bundle", place.bundle, status=2)
    assert not (place.checkout / ".venv").exists()


def test_parts_are_joined_once_all_are_whole(place: Place) -> None:
    place.run("bundle.sh", place.bundle, "--parts", "4K")
    parts = place.folder / "bundle.parts"
    files = sorted(parts.glob("part-*"))
    assert [file.stat().st_size for file in files[:-1]] == [4096] * (len(files) - 1)
    assert "join them first" in place.run("setup.sh", "--bundle", parts, status=2)
    kept = files[1].read_bytes()
    files[1].write_bytes(kept[:-1] + b"x")
    files[2].rename(parts / "elsewhere")
    joined = place.folder / "joined"
    said = place.run("join_bundle.sh", parts, joined, status=2)
    assert "damaged or missing: part-0001 part-0002; copy them again." in said
    assert list(place.folder.glob("joined*")) == []
    files[1].write_bytes(kept)
    (parts / "elsewhere").rename(files[2])
    place.run("join_bundle.sh", parts, joined)
    assert {file.name: file.read_bytes() for file in joined.iterdir()} == {
        file.name: file.read_bytes() for file in place.bundle.iterdir()
    }


class Index(ThreadingHTTPServer):
    """Serves a folder's wheels, but never answers for beta."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.over, self.fetched = folder, Event(), Event(), list[str]()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        name = self.path.strip("/")
        if name == BETA:
            self.server.asked.set()
            self.server.over.wait()
            return
        self.server.fetched += [name]
        links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in self.server.folder.glob("*.whl"))
        body = (self.server.folder / name).read_bytes() if name else f"<html>{links}</html>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if not name else "application/zip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(place: Place) -> Iterator[Index]:
    server = Index(place.index)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def test_a_killed_run_leaves_nothing_whole_and_the_next_goes_on(place: Place, index: Index) -> None:
    command = ["bash", "scripts/bundle.sh", place.bundle]
    environment = place.environment(index.address)
    running = subprocess.Popen(command, cwd=place.checkout, env=environment, start_new_session=True)
    partial = place.folder / "bundle.partial"
    index.asked.wait()
    while not (partial / ALPHA).exists():
        assert running.poll() is None
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert index.fetched.count(ALPHA) == 1
    assert not place.bundle.exists()
    assert not (partial / "SHA256SUMS").exists()
    assert "is not a whole bundle" in place.run("setup.sh", "--bundle", partial, status=2)
    (place.index / ALPHA).unlink()  # it cannot be fetched again
    assert "2 wheels, 1 to fetch" in place.run("bundle.sh", place.bundle)
    assert place.wheels() == [ALPHA, BETA]
    assert list(place.folder.glob("*.partial")) == []
