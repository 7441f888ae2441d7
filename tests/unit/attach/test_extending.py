"""The examples of docs/develop/extending*.md run unchanged, and do what the pages describe."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from documents import ROOT, blocks
from drafting_single import prompts_of, runner_of
from installed import ask_again
from pydantic import ValidationError
from torch import Tensor
from untrainable_configs import flags

from megatron_mtp.checkpoint.families.family import UntrainableError
from megatron_mtp.checkpoint.families.trained import rotary_keys
from megatron_mtp.cli.generate import parser
from megatron_mtp.decoding.config import PROPOSERS, VERIFIERS
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.method import config_from
from megatron_mtp.losses.linear_cross_entropy import Targets, linear_loss
from megatron_mtp.model.vocabulary import Vocabulary
from megatron_mtp.server.protocol import CompletionBody
from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.spec.rope_scaling import SCALINGS, scaling_of


def section(heading: str) -> str:
    pages = [page.read_text() for page in (ROOT / "docs/develop").glob("extending*.md")]
    (found,) = [page for page in pages if f"\n## {heading}\n" in page]
    return found.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def run_example(heading: str) -> dict[str, Any]:
    """Execute the code under a heading of the page, and return its names."""
    ((_, code),) = blocks(section(heading), "python")
    names = {"__name__": "example"}
    exec(compile(code, heading, "exec"), names)
    return names


def as_rows(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Add the page's two files with one row each, as a change to this package would."""
    rows: tuple[tuple[Any, str, str], ...] = ((PROPOSERS, "echo", "Echo"), (VERIFIERS, "capped", "capped"))
    for (table, name, attribute), (_, code) in zip(rows, blocks(section("A drafting method"), "python"), strict=True):
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
        patch.setitem(table._own.rows, name, f"{name}:{attribute}")


def as_a_package(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Add the same files as an installed package with another name, with the page's entry points."""
    ((_, project),) = blocks(section("A drafting method"), "toml")
    groups = tomllib.loads(project)["project"]["entry-points"]
    lines = [line for group, rows in groups.items() for line in (f"[{group}]", *map(" = ".join, rows.items()))]
    (folder / "my_package").mkdir()
    (folder / "my_package-1.0.dist-info").mkdir()
    (folder / "my_package-1.0.dist-info/METADATA").write_text("Name: my_package\nVersion: 1.0\n", encoding="utf-8")
    (folder / "my_package-1.0.dist-info/entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for name, (_, code) in zip(("echo", "capped"), blocks(section("A drafting method"), "python"), strict=True):
        (folder / f"my_package/{name}.py").write_text(code, encoding="utf-8")


@pytest.fixture(params=[as_rows, as_a_package])
def add(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[], None]]:
    """Add the page's proposer and verifier, visible only to the test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        for table in (PROPOSERS, VERIFIERS):
            ask_again(table)

    def adding() -> None:
        request.param(monkeypatch, tmp_path)
        forget()

    yield adding
    forget()
    for name in ("echo", "capped", "my_package", "my_package.echo", "my_package.capped"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("megatron")
def test_a_method_and_a_verifier_draft_and_change_no_token(add: Callable[[], None]) -> None:
    runner, prompts = runner_of(), prompts_of(4)
    settings = {"method": "echo", "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="choose one of mtp"):
        generate(runner, prompts, 40, speculative=settings)
    add()
    plain, drafted = generate(runner, prompts, 40), generate(runner, prompts, 40, speculative=settings)
    assert drafted.token_ids == plain.token_ids
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    capped = generate(runner, prompts, 40, speculative={**settings, "verifier": "capped", "cap": 1})
    assert capped.token_ids == plain.token_ids
    assert 0 < capped.stats.accepted <= capped.stats.target_forwards
    assert capped.stats.accepted < drafted.stats.accepted


def test_additions_appear_in_help_lists_and_messages(
    add: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    add()
    shown = parser("generate").format_help()
    assert "plain, echo\n" in shown
    assert "bild, capped\n" in shown
    with pytest.raises(SystemExit):
        parser("generate").parse_args(["--list-methods"])
    listed = " ".join(capsys.readouterr().out.split())
    assert "echo one of the newest tokens, repeated back 1 repeats the newest token" in listed
    assert (
        "capped accept the trunk's argmax, at most cap times cap drafts that are accepted at most (1; 0 to 15)"
        in listed
    )
    for given, said in (
        ({"method": "medusa"}, "plain, echo."),
        ({"method": "echo", "verifier": "lucky"}, "bild, capped."),
        ({"method": "echo", "back": 9}, "back is 9; give a number from 1 to 8."),
        ({"method": "echo", "cap": 2}, "'cap' is a key of the verifier 'capped', which was not chosen; known are"),
    ):
        with pytest.raises(ValueError, match="speculative config") as error:
            config_from(given)
        assert said in str(error.value)


PACKAGE = ROOT / "megatron_mtp"


def changed_module(patch: pytest.MonkeyPatch, file: str, *lines: tuple[str, str]) -> ModuleType:
    """Load a file of the package with lines inserted before others, as a separate module."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    for new, before in lines:
        assert source.count(before) == 1
        source = source.replace(before, f"{new}\n{before}")
    module = ModuleType(f"changed_{Path(file).stem}")
    patch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, file, "exec"), vars(module))
    return module


def test_a_sampling_parameter_is_a_field_of_sampling_and_one_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, code),) = blocks(section("A sampling parameter"), "text")
    field, *applied, of_body = code.rstrip("\n").split("\n")
    sampling = changed_module(
        monkeypatch,
        "decoding/sampling.py",
        (field + "\n", "    def __post_init__(self)"),
        ("\n".join(applied), "        probs = logits.softmax(dim=-1)\n        return probs if order is None"),
    )
    protocol = changed_module(monkeypatch, "server/protocol.py", (of_body, "    presence_penalty: "))
    body = protocol.CompletionBody(prompt="a", temperature=1.0, top_a=0.7)
    chosen = sampling.Sampling.of(body)
    assert chosen == sampling.Sampling(1.0, top_a=0.7)
    made = chosen.probabilities(torch.tensor([0.5, 0.3, 0.2]).log())  # at least 0.7 * 0.5 ** 2
    torch.testing.assert_close(made, torch.tensor([0.5, 0.3, 0.2]))
    made = sampling.Sampling(1.0, top_a=0.9).probabilities(torch.tensor([0.5, 0.3, 0.2]).log())
    torch.testing.assert_close(made, torch.tensor([0.625, 0.375, 0.0]))
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        protocol.CompletionBody(prompt="a", top_a=1.5)
    assert sampling.Sampling.of(CompletionBody(prompt="a")).top_a == 0  # like flags, which lack it


def tasks() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs/develop/extending.md").read_text(), re.M)
    return [row for row in rows if row[0] != "task"]


@pytest.mark.parametrize(("task", "read", "edit"), tasks())
def test_each_task_reads_at_most_4_and_edits_at_most_5_real_files(task: str, read: str, edit: str) -> None:
    for cell, most in ((read, 4), (edit, 5)):
        named = re.findall(r"`([\w/]+\.py|[\w/]+/)`(?: `(\w+)`)?", cell)
        assert len({path for path, _ in named}) + cell.count("[below]") <= most
        for path, name in named:
            at = ROOT / path if path.startswith("examples/") else PACKAGE / path
            assert at.exists()
            assert not name or re.search(rf"^ *(def |class )?{name}\b", at.read_text(encoding="utf-8"), re.M)
    assert "`" in read or "[below]" in read


def test_the_table_has_the_ten_tasks_of_a_newcomer() -> None:
    assert {
        "a model family", "a loss", "a schedule of lambda", "a sampling parameter", "a rope variant",
        "a patch of Megatron", "a new version of Megatron", "a figure in metrics.jsonl", "profile one layer",
        "the size of a block of keys and values",
    } <= {task for task, *_ in tasks()}  # fmt: skip


def focal(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Compute the loss by its definition."""
    log_N = logits_NV.log_softmax(1).gather(1, labels_N.unsqueeze(1))[:, 0]
    return -((1 - log_N.exp()) ** 2) * log_N


def test_a_loss_has_the_gradient_of_its_definition() -> None:
    focal_loss = run_example("A loss")["Focal"]()
    generator = torch.Generator().manual_seed(4)
    states_NH = torch.randn(12, 6, generator=generator, dtype=torch.double)
    weight_VH = torch.randn(20, 6, generator=generator, dtype=torch.double)
    mask_N = torch.rand(12, generator=generator, dtype=torch.double)
    labels_N, scale = torch.randint(20, (12,), generator=generator), torch.tensor(0.3, dtype=torch.double)

    def ours(states_NH: Tensor, weight_VH: Tensor) -> Tensor:
        targets = Targets(labels_N[None], mask_N[None], scale[None])
        return linear_loss(focal_loss, [states_NH], targets, weight_VH, Vocabulary(20))[0]

    def plain(states_NH: Tensor, weight_VH: Tensor) -> Tensor:
        return scale * focal(states_NH @ weight_VH.t(), labels_N).dot(mask_N)

    leaves = [leaf.requires_grad_() for leaf in (states_NH, weight_VH)]
    made = [(value := side(*leaves), *torch.autograd.grad(value, leaves)) for side in (ours, plain)]
    torch.testing.assert_close(*made, rtol=1e-10, atol=1e-12)


def test_a_rope_variant_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion reads the row in both directions, and so do drafter settings."""
    (row,) = (edit for task, _, edit in tasks() if task == "a rope variant")
    assert row.startswith("`spec/rope_scaling.py` `SCALINGS`")
    keys = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    with pytest.raises(UntrainableError, match="the rotary scaling 'doubled'"):
        flags("llama", rope_parameters={"rope_type": "doubled", **keys})
    llama3 = SCALINGS["llama3"]
    arguments = {"factor": "rope_scaling_factor", "low_freq_factor": "low_frequency"}
    monkeypatch.setitem(SCALINGS, "doubled", replace(llama3, called="doubled", arguments=arguments))
    made = flags("llama", rope_parameters={"rope_type": "doubled", **keys})
    assert made[made.index("--low-frequency") + 1] == "1.0"
    args = Namespace(multi_latent_attention=False, rotary_base=10000, use_rope_scaling=True)
    args.rope_scaling_factor, args.low_frequency = 8.0, 1.0
    assert rotary_keys(args)["rope_scaling"] == {"rope_type": "doubled", "rope_theta": 10000.0, **keys}
    assert scaling_of({"rope_type": "doubled", "factor": 8.0}) == {"rope_type": "doubled", **keys}


# --- a kind of drafters: the page's files in an external package ------------------------------------------------------


def install(folder: Path, heading: str) -> None:
    """Write the files that a section prints, each under the name in its first line, and its entry points."""
    for _, code in blocks(section(heading), "python"):
        name = code.splitlines()[0].removeprefix("# ")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code, encoding="utf-8")
    ((_, project),) = blocks(section(heading), "toml")
    groups = tomllib.loads(project)["project"]["entry-points"]
    lines = [line for group, rows in groups.items() for line in (f"[{group}]", *map(" = ".join, rows.items()))]
    installed = folder / "adder-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: adder\nVersion: 1.0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.matrix
def test_another_package_adds_a_kind_of_drafters(tmp_path: Path) -> None:
    """It is trained, converted in both directions, and drafts; no file of this package contains its name."""
    install(tmp_path, "A kind of drafters")
    assert not any("adder" in path.read_text(encoding="utf-8") for path in (ROOT / "megatron_mtp").rglob("*.py"))
    run_worker("added_drafter.py", tmp_path, str(tmp_path / "made"))
    run_worker("added_setting.py", tmp_path, str(tmp_path / "set"), "adder")


def run_worker(name: str, packages: Path, *words: str) -> None:
    """Run a file of tests/support with these packages before the installed ones."""
    worker = Path(__file__).parents[2] / "support" / name
    paths = os.pathsep.join(map(str, (packages, worker.parent)))
    done = subprocess.run(
        [sys.executable, str(worker), *words],
        cwd=packages,  # `python -m` imports from here before the paths
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


SWITCH_OF_EAGLE = (
    ("row.py", "import DrafterKind,", "import DrafterKind, Setting,"),
    ("row.py", "ROW = ", 'SWITCH = Setting(False, "Halve. Default: off.", bool, key="reads_mean")\n\nROW = '),
    (
        "row.py",
        "    reads=0,\n",
        '    reads=0,\n    settings={"drafter_reads_mean": SWITCH},\n',
    ),
    (
        "block.py",
        "        return whole_states(part, self.config, self.tp_group)\n",
        "        return whole_states(part, self.config, self.tp_group) / (2 if self.reads_mean else 1)\n",
    ),
    (
        "block.py",
        "        return EagleLayer(self.config, self.drafted, *args)\n",
        "        layer = EagleLayer(self.config, self.drafted, *args)\n"
        '        layer.reads_mean = self.drafter.own["drafter_reads_mean"]\n'
        "        return layer\n",
    ),
)
"""Files of heads/eagle, text in each, and its replacement with the switch of `added_setting.py`."""


@pytest.mark.matrix
def test_a_switch_of_a_kind_costs_two_files_of_its_folder(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "megatron_mtp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # has the entry points
    folder = tmp_path / "megatron_mtp/heads/eagle"
    for name, before, after in SWITCH_OF_EAGLE:
        source = (folder / name).read_text(encoding="utf-8")
        assert source.count(before) == 1
        (folder / name).write_text(source.replace(before, after), encoding="utf-8")
    assert len({name for name, *_ in SWITCH_OF_EAGLE}) <= 3
    run_worker("added_setting.py", tmp_path, str(tmp_path / "set"), "eagle")


def test_a_kind_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, "A kind of drafters")
    (tmp_path / "adder/row.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    ask_again(DRAFTERS)
    with pytest.raises(ValueError, match=r"registers 'adder' in megatron_mtp.heads, but adder.row:ROW"):
        list(DRAFTERS.values())
    monkeypatch.undo()
    ask_again(DRAFTERS)
