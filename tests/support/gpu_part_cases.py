"""Parts of a GPU check that succeed and fail, for test_gpu_check.py."""

import os
import subprocess
import time

from benchmarks.gpu import Part
from benchmarks.gpu.part import NotRunError, Setting
from benchmarks.harness import Found, Goal, Table

FIRST = Found({"first": 1.5}, [Goal("first", 1.5, 2.0)], [Table("Speed", ("side", "s"), [("ours", 1.5)])])


def runs(_: Setting) -> Found:
    return Found({"one": 1}, [Goal("one", 1, 1)], not_run={"half": "there is no other"})


def fails_after_figures(setting: Setting) -> Found:
    setting.keep(FIRST)
    raise RuntimeError("out of memory")


def hangs_after_figures(setting: Setting) -> Found:
    setting.keep(FIRST)
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
    return FIRST


def starts_a_command(setting: Setting, code: str) -> Found:
    return Found({"printed": setting.run("command", ["-c", code], "cpu")})


def tells_its_size(setting: Setting) -> Found:
    return Found({"quick": setting.quick, "short": setting.short})


def crashes(_: Setting) -> Found:
    print("a driver that ends the process", flush=True)
    os.abort()


def cannot(_: Setting) -> Found:
    raise NotRunError("it is too hot")


HERE = "gpu_part_cases"
CASES = {
    "runs": Part(f"{HERE}:runs", 60),
    "fails_after_figures": Part(f"{HERE}:fails_after_figures", 60),
    "crashes": Part(f"{HERE}:crashes", 60, line="te"),
    "cannot": Part(f"{HERE}:cannot", 60),
    "lacks": Part(f"{HERE}:runs", 60, needs=("json", "no_such_module")),
    "needs_cuda": Part(f"{HERE}:runs", 60, only_cuda=True),
    "commands": Part(f"{HERE}:starts_a_command", 60, {"code": "print('forked')"}),
    "shortens": Part(f"{HERE}:tells_its_size", 60, short=30),
    "hangs": Part(f"{HERE}:hangs_after_figures", 4, alone=True),
    "last": Part(f"{HERE}:runs", 60, alone=True),
}
