"""A boolean setting of a drafter kind, `drafter_reads_mean`: as a flag, in checkpoints, in the block, in a folder.

PYTHONPATH=PACKAGES:tests/support python tests/support/added_setting.py FOLDER KIND

Its block halves what `merge` returns; its key in config.json is `reads_mean`.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from drafter_folders import make_trunk
from hf_models import HIDDEN
from judged_models import QUIET
from megatron_single import join_world_of_one

import megatron_mtp
from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter, plan_drafter
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli.train import parser
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.spec.config import MTPConfig

NAME, FLAG, KEY = "drafter_reads_mean", "--drafter-reads-mean", "reads_mean"
RUN = (
    "train --use-checkpoint-args --micro-batch-size 2 --global-batch-size 2 --seq-length 16 --train-iters 1 --lr 1e-3 "
    "--eval-interval 100 --eval-iters 0 --save-interval 1 --mock-data --tokenizer-type NullTokenizer --drafter-steps 2 "
)


def main(folder: Path, kind: str) -> None:
    if (Path.cwd() / "megatron_mtp").is_dir():
        assert Path(megatron_mtp.__file__).parents[1] == Path.cwd()
    settings = MTPConfig(drafter=kind, **{NAME: True})
    assert replace(settings, **{NAME: None}) == MTPConfig(drafter=kind) != settings
    assert hash(settings) == hash(MTPConfig(drafter=kind, **{NAME: True}))
    try:
        MTPConfig(drafter="dflash", **{NAME: True})
    except ValueError as error:
        assert f"{FLAG} was given with --drafter dflash; give --drafter {kind}," in str(error)  # noqa: PT017
    else:
        raise AssertionError("a kind that does not read the switch took it")
    assert f"{FLAG} " in parser("train").format_help()

    folder.mkdir()
    trunk, saved, exported, attached = make_trunk(folder)[1], *(folder / name for name in ("saved", "folder", "again"))
    train(f"--load {trunk} --save {saved} --drafter {kind} {FLAG}")
    check_checkpoint(saved)
    plan_drafter(saved, QUIET).write(exported, QUIET)
    keys = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert keys[KEY] is True
    plan_attaching_drafter(trunk, exported).write(attached, QUIET)
    check_checkpoint(attached)

    del keys[KEY]
    (exported / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    plan_attaching_drafter(trunk, exported).write(folder / "without", QUIET)
    assert DistReader(folder / "without").common()["args"].drafter_reads_mean is None


def train(flags: str) -> None:
    command = [sys.executable, "-m", "megatron_mtp", *f"{RUN} {flags}".split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def check_checkpoint(path: Path) -> None:
    """Check that its arguments have the setting, and that the block built from them uses it."""
    assert DistReader(path).common()["args"].drafter_reads_mean is True
    layer = load_model(path).mtp.layer
    given = torch.randn(2, 3, 1, HIDDEN)
    on = layer.merge(*given)
    layer.reads_mean = False
    torch.testing.assert_close(on, layer.merge(*given) / 2)


if __name__ == "__main__":
    quieten()
    join_world_of_one()
    main(Path(sys.argv[1]), sys.argv[2])
