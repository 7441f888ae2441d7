"""The table of losses: what is derived from it, and losses added by a file or by another package.

The added loss is that of docs/develop/extending.md, which shows its file, its row and its entry point.
"""

import re
import sys
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from documents import ROOT, blocks
from installed import ask_again
from megatron_single import make_batch, our_model

from megatron_mtp.cli.train import parse_run, parser
from megatron_mtp.losses.mix import mix_weights
from megatron_mtp.losses.mtp_loss import mtp_loss, trunk_states
from megatron_mtp.losses.table import LOSSES, depth_loss, listing
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.registry import Imported

OWN = LOSSES._own
assert isinstance(OWN, Imported)
SECTION = (ROOT / "docs/develop/extending.md").read_text(encoding="utf-8").split("\n## A loss\n")[1]


@pytest.fixture
def added_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the page's file as an importable module, added_focal."""
    ((_, code),) = blocks(SECTION, "python")
    file = tmp_path / "added_focal.py"
    file.write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    sys.modules.pop("added_focal", None)
    ask_again(LOSSES)


def add_by_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the page's row with a different module."""
    ((_, row),) = blocks(SECTION, "text")
    rows = literal_eval("{" + row.strip().replace("megatron_mtp.losses.focal", file.stem) + "}")
    for name, where in rows.items():
        monkeypatch.setitem(OWN.rows, name, where)


def add_by_entry_point(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the page's entry point with a different module."""
    ((_, toml),) = blocks(SECTION, "toml")
    assert "[project.entry-points." in toml
    (line,) = [line for line in toml.splitlines() if line.startswith("focal")]
    point = line.replace('"', "").replace("my_package.focal", file.stem)
    package = file.parent / "outside-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: outside\nVersion: 1.0\n", encoding="utf-8")
    (package / "entry_points.txt").write_text(f"[{LOSSES.group}]\n{point}\n", encoding="utf-8")
    ask_again(LOSSES)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("add", [add_by_file, add_by_entry_point])
def test_an_added_loss_is_a_choice_of_the_flag_and_trains_a_step(
    add: object, added_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^--mtp-loss is 'focal'; choose one of ce, kd, .*, mix\.$"):
        depth_loss(MTPConfig(mtp_loss="focal"))
    add(added_file, monkeypatch)  # type: ignore[operator]
    assert "ce,kd,tv,nla,lk,e2e_tv,dpace,mix,focal" in help_of_losses()
    assert listing().endswith("\n  focal   the labels, easy tokens less")
    model, batch = our_model(2), make_batch(2)
    optimizer = torch.optim.SGD(model.mtp.parameters(), lr=0.05)
    for settings in (MTPConfig(mtp_loss="focal"), MTPConfig(mtp_loss="mix", mtp_loss_mix="focal=0.5,kd=0.5")):
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            hidden_SBH = trunk_states(model, batch["tokens"]).detach()
            made = mtp_loss(hidden_SBH, model, batch["tokens"], batch["labels"], batch["loss_mask"], settings)
            made.loss.backward()
            optimizer.step()
            losses.append(made.loss.item())
        assert losses[1] < losses[0]


def help_of_losses() -> str:
    """Return the `--help` text of `--mtp-loss` on one line."""
    shown = " ".join(parser("train").format_help().split())
    return shown.split("--mtp-loss {")[1].split(" --mtp-loss-mix ")[0]


def test_the_help_has_every_name_and_the_list_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of_losses().startswith("ce,kd,tv,nla,lk,e2e_tv,dpace,mix} Loss of the MTP layers")
    with pytest.raises(SystemExit) as end:
        parse_run("train", ["--list-losses"])
    assert end.value.code == 0
    assert capsys.readouterr().out == "".join(f"  {name:<8}{loss.line}\n" for name, loss in LOSSES.items())


def test_the_page_has_a_row_for_every_loss() -> None:
    section = (ROOT / "docs/reference/losses.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.M) == [(name, loss.line) for name, loss in LOSSES.items()]


@pytest.mark.parametrize(
    ("name", "needs_teacher", "needs_whole_teacher"),
    [("ce", False, False), ("kd", True, False), ("tv", True, True), ("nla", True, True), ("lk", True, True)],
)
def test_a_mix_needs_the_same_teacher_as_its_parts(name: str, needs_teacher: bool, needs_whole_teacher: bool) -> None:
    for settings in (MTPConfig(mtp_loss=name), MTPConfig(mtp_loss="mix", mtp_loss_mix=f"{name}=2")):
        made = depth_loss(settings)
        assert (made.needs_teacher, made.needs_whole_teacher) == (needs_teacher, needs_whole_teacher)


def test_only_e2e_tv_couples_depths_and_it_needs_the_trunk() -> None:
    assert [name for name, loss in LOSSES.items() if loss.couples_depths] == ["e2e_tv"]
    made = depth_loss(MTPConfig(mtp_loss="e2e_tv"))
    assert made.needs_teacher
    assert made.needs_whole_teacher


def test_parts_of_a_mix_with_weight_zero_are_ignored() -> None:
    assert not depth_loss(MTPConfig(mtp_loss="mix", mtp_loss_mix="1,0,0")).needs_teacher
    assert not depth_loss(MTPConfig(mtp_loss="mix", mtp_loss_mix="1,0.5,0")).needs_whole_teacher


def test_weights_have_names_or_the_order_of_the_first_three() -> None:
    assert mix_weights("0.2,0.3,0.5") == {"ce": 0.2, "kd": 0.3, "tv": 0.5}
    assert mix_weights("tv=0.5") == {"tv": 0.5}


WRONG_WEIGHTS = "1,2 1,2,3,4 nan,1,1 0,0,0 -1,1,1 ce=1,2 ce=1,ce=2 mse=1 mix=1 e2e_tv=1 ce=x ce=0".split()


@pytest.mark.parametrize("given", WRONG_WEIGHTS)
def test_wrong_weights_are_named_with_the_remedy(given: str) -> None:
    with pytest.raises(ValueError, match=r"; give 3 numbers .*, as in ce=0\.5,tv=0\.5") as caught:
        depth_loss(MTPConfig(mtp_loss="mix", mtp_loss_mix=given))
    assert str(caught.value).startswith(f"--mtp-loss-mix is '{given}'; ")


def test_an_unknown_loss_is_rejected_with_the_list_of_losses() -> None:
    with pytest.raises(ValueError, match=rf"^--mtp-loss is 'mse'; choose one of {', '.join(LOSSES)}\.$"):
        depth_loss(MTPConfig(mtp_loss="mse"))
