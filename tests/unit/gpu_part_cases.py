"""Parts of a GPU check that go well and wrong, for test_gpu_check.py; each runs as a process of its own."""

import os
import time

from benchmarks.gpu.part import Found, NotRunError, Setting, Table
from benchmarks.harness import Goal

FIRST = Found({"first": 1.5}, [Goal("first", 1.5, 2.0)], [Table("Speed", ("side", "s"), [("ours", 1.5)])])


def runs(_: Setting) -> Found:
    return Found({"one": 1}, [Goal("one", 1, 1)], not_run={"half": "there is no other"})


def fails_after_figures(setting: Setting) -> Found:
    setting.keep(FIRST)
    raise RuntimeError("out of memory")


def hangs_after_figures(setting: Setting) -> Found:
    setting.keep(FIRST)
    print("at step 7", flush=True)
    time.sleep(600)
    return FIRST


def crashes(_: Setting) -> Found:
    print("a driver that ends the process", flush=True)
    os.abort()


def cannot(_: Setting) -> Found:
    raise NotRunError("it is too hot")
