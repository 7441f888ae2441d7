"""Around the engine: prompts, streamed text, stop strings, the table, energy, and K chosen by cost."""

import io
import math
import re
import runpy
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documents import ROOT
from drafting_single import model_of, prompts_of, runner_of, trained_forward

from megatron_mtp.cli import cost
from megatron_mtp.cli.cost import Cost, Workload, summary, table
from megatron_mtp.cli.generate import parser
from megatron_mtp.cli.terminal import COLOR, PLAIN, Stream, cutter, read_prompts
from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.data.tokenizer import load_tokenizer, train_bpe
from megatron_mtp.decoding.config import PROPOSERS, VERIFIERS, SpeculativeConfig, keys
from megatron_mtp.decoding.draft import Draft
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.requests import Update
from megatron_mtp.decoding.sampling import Sampling

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return load_tokenizer(train_bpe(["abc abd ü€"], 258, tmp_path_factory.mktemp("tokenizer")))


def test_prompts_come_from_flags_files_and_token_ids(tokenizer: object, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("ab\n")
    (tmp_path / "many.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "bc"}\n')
    ids = tokenizer.encode  # type: ignore[attr-defined]
    assert read_prompts(["c"], str(tmp_path / "one.txt"), ["1,2"], tokenizer) == [ids("c"), ids("ab\n"), [1, 2]]  # type: ignore[arg-type]
    assert read_prompts([], str(tmp_path / "many.jsonl"), [], tokenizer) == [ids("a"), ids("bc")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "file", "ids", "said"),
    [
        (["ab\udcff"], None, [], r"a prompt holds '\\udcff' at character 3, which is not UTF-8; take it out"),
        ([], None, ["1;2"], "--prompt-ids is '1;2'"),
        ([], "latin.txt", [], "cannot be read"),
        ([], "bad.jsonl", [], "not a JSON object with a key 'prompt'"),
        ([], "ids.jsonl", [], r"has the prompt \[1, 2\], which is not text"),
    ],
)
def test_bad_prompts_are_rejected(
    texts: list[str], file: str | None, ids: list[str], said: str, tokenizer: object, tmp_path: Path
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "ids.jsonl").write_text('{"prompt": [1, 2]}\n')
    with pytest.raises(ValueError, match=said):
        read_prompts(texts, None if file is None else str(tmp_path / file), ids, tokenizer)  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_streams_with_its_drafts_in_color(tokenizer: object) -> None:
    """The euro sign is three tokens; it appears with the last one."""
    a, b, *euro = tokenizer.encode("ab€")  # type: ignore[attr-defined]
    output = Terminal()
    stream = Stream(tokenizer, output)  # type: ignore[arg-type]
    stream([a, b], 1)
    stream(euro[:2], 0)
    assert output.getvalue().endswith("b")
    stream(euro[2:], 0)
    assert output.getvalue() == f"{COLOR}a{PLAIN}b€"
    plain = io.StringIO()
    Stream(tokenizer, plain)([a, b], 1)  # type: ignore[arg-type]
    assert plain.getvalue() == "ab"


def test_a_recorded_step_holds_the_tree_and_its_acceptance() -> None:
    """The second sequence of a batch: a tree a -> b and c, of which c was no candidate; then a draft beyond its end."""
    tree = Draft(
        torch.tensor([[0, 0, 0], [5, 6, 7]]),
        parents_BN=torch.tensor([[0, 1, 1], [0, 1, 1]]),
        valid_BN=torch.tensor([[True] * 3, [True, True, False]]),
    )
    steps = [Update(7, [4]), Update(7, [5, 8], 1, 2, draft=tree, row=1), Update(7, [5, 6], 1, 1, draft=tree, row=1)]
    assert [step.as_json() for step in steps] == [
        {"drafted": [], "parents": [], "accepted": 0, "emitted": [4]},
        {"drafted": [5, 6, None], "parents": [0, 1, 1], "accepted": 1, "emitted": [5, 8]},
        {"drafted": [5, None, None], "parents": [0, 1, 1], "accepted": 1, "emitted": [5, 6]},
    ]


def test_stop_strings_cut_after_the_token_that_completes_them(tokenizer: object) -> None:
    ids = tokenizer.encode("abcabd")  # type: ignore[attr-defined]
    cut = cutter(["ca", "zz"], tokenizer)  # type: ignore[arg-type]
    assert cut(ids[:3]) is None
    assert cut(ids) == 4


def test_figures_of_a_run() -> None:
    first, second = AcceptanceStats(), AcceptanceStats()
    first.count(2, 2, 3)
    second.count(1, 0, 1)
    stats = first + second
    figures = summary(Cost(stats, 2.0), torch.float32, Cost(stats, 4.0, 1.0), same=True)
    assert figures["accepted_per_position"] == [0.5, 1.0]
    assert figures["accepted_length"] == figures["tokens_per_second"] == figures["speed_up"] == 2.0
    assert figures["break_even_length"] == 1.0, "a round takes as long as a plain step"
    assert figures["energy_joules_per_token"] is None
    assert figures["energy_reason"].startswith("zeus (the extra `energy`) is not installed")
    assert "energy" not in table(figures, sampled=False)
    assert "energy 4 J a token" in " ".join(table(figures | {"energy_joules_per_token": 4.0}, False).split())
    words = table(figures, sampled=False).split()
    assert "speed-up 2.00 over plain decoding at 1.0 tokens per second same tokens yes" in " ".join(words)
    assert summary(Cost(stats, 2.0, 8.0), torch.float32)["energy_joules_per_token"] == 2.0


@pytest.mark.parametrize(
    ("seconds", "turns", "median"),
    [
        ([4.0, 2.0, 3.0, 9.0, 5.0, 1.0], 3, (2.0, 4.0)),
        ([0.25, 0.5] * 4, 3, (0.5, 0.25)),  # 2.25 s
        ([0.125, 0.125] * 8, 4, (0.125, 0.125)),  # 1 s
        ([50.0, 60.0] * 3, 2, (60.0, 50.0)),  # 220 s
    ],
)
def test_compared_sides_alternate_and_skip_the_first_run(
    seconds: list[float], turns: int, median: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workload(None, [[1]], 4, Sampling(), frozenset(), None, None, 1, 0)  # type: ignore[arg-type]
    each = iter(seconds)
    sides: list[object] = []

    def timed(_: Workload, config: object, emit: object = None) -> tuple[list[list[int]], Cost]:
        sides.append(config)
        return [[7]], Cost(AcceptanceStats(), next(each))

    monkeypatch.setattr(Workload, "timed", timed)
    monkeypatch.setattr(cost, "MOST_SECONDS", 120.0)
    drafting, plain, same = work.compared("config", [[7]])  # type: ignore[arg-type]
    assert sides == [None, "config"] * turns
    assert (drafting.seconds, plain.seconds, same) == (*median, True)


def test_perplexity_is_by_the_trunk_at_temperature_one() -> None:
    target, twin, prompts = runner_of(), model_of("gqa"), prompts_of(3)
    work = Workload(target, prompts, 9, Sampling(2.0), frozenset(), None, None, 2, 0)
    for config in (None, SpeculativeConfig("mtp", 2)):
        texts, cost = work.timed(config)
        chances = [
            trained_forward(twin, prompt + text)[0].log_softmax(-1)[place - 1, token].item()
            for prompt, text in zip(prompts, texts, strict=True)
            for place, token in enumerate(text, start=len(prompt))
        ]
        assert work.perplexity(config) == pytest.approx(math.exp(-sum(chances) / 27))
    shown = table(summary(cost, torch.float64, cost, None, (2.5, 3.0)), sampled=True)
    assert "perplexity 2.500; of plain decoding 3.000" in " ".join(shown.split())


def test_a_text_depends_on_its_own_seed_in_any_batch() -> None:
    """Prompt i has the first prompt's seed plus i, whatever else is in the batch."""
    target, prompts = runner_of(), prompts_of(5)
    one_by_one, pairs, at_once = (
        Workload(target, prompts, 9, Sampling(2.0), frozenset(), None, None, batch, 7).timed(None)[0]
        for batch in (1, 2, 5)
    )
    assert one_by_one == pairs == at_once
    assert one_by_one[4] == generate(target, [prompts[4]], 9, Sampling(2.0), seeds=[11]).token_ids[0]


def test_outputs_that_differ_by_rounding_are_explained() -> None:
    stats = AcceptanceStats()
    stats.count(2, 2, 3)
    one = Cost(stats, 1.0)
    for dtype, said in (
        (torch.float32, "same tokens +NO$"),
        (torch.bfloat16, "NO: bfloat16 rounds .* --dtype float32"),
    ):
        assert re.search(said, table(summary(one, dtype, one, same=False), sampled=False))


class StandInMonitor:
    """zeus's monitor, which counts 2.5 J on a GPU in every window, and 4 J on each of two CPUs."""

    def __init__(self, gpu_indices: list[int], cpu_indices: list[int] | None) -> None:
        self.gpu_indices, self.cpu_indices = gpu_indices, [0, 1] if cpu_indices is None else cpu_indices

    def begin_window(self, key: str) -> None:
        self.key = key

    def end_window(self, key: str) -> SimpleNamespace:
        assert key == self.key
        return SimpleNamespace(
            gpu_energy=dict.fromkeys(self.gpu_indices, 2.5), cpu_energy=dict.fromkeys(self.cpu_indices, 4.0)
        )


@pytest.mark.parametrize(("on_cpu", "joules"), [(True, 8.0), (False, 2.5)])
def test_energy_is_that_of_the_device_of_this_process(
    on_cpu: bool, joules: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=StandInMonitor))
    monkeypatch.setitem(sys.modules, "zeus", SimpleNamespace())
    monkeypatch.setattr(cost.cpu, "installed", lambda: on_cpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert cost.start_meter()() == joules


def test_energy_is_missing_without_a_library_or_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeus", SimpleNamespace())
    without = SimpleNamespace(ZeusMonitor=lambda *_: SimpleNamespace(gpu_indices=[], cpu_indices=[]))
    for module in (without, None):
        monkeypatch.setitem(sys.modules, "zeus.monitor", module)
        assert cost.start_meter()() is None


@pytest.mark.skipif(find_spec("zeus") is None, reason="zeus is not installed; pip install zeus")
def test_energy_of_counters_that_zeus_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU package that zeus finds among files; its counter only advances by 3 J."""
    import zeus.device.cpu
    from zeus.device.cpu import rapl

    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, content in {"name": "package-0", "energy_uj": "2000000", "max_energy_range_uj": "10000000"}.items():
        (zone / name).write_text(content)
    monkeypatch.setattr(rapl, "RAPL_DIR", str(tmp_path))
    rapl.rapl_is_available.cache_clear()
    monkeypatch.setattr(zeus.device.cpu, "_cpus", None)
    monkeypatch.setattr(rapl.RAPLFile, "wraparound_tracker", SimpleNamespace(get_num_wraparounds=lambda: 0))
    joules = cost.start_meter()
    (zone / "energy_uj").write_text("5000000")
    assert joules() == pytest.approx(3.0)
    rapl.rapl_is_available.cache_clear()


def test_the_help_lists_methods_and_examples() -> None:
    shown = parser("generate_gpt.py").format_help()
    for word in ("mtp_tree", "lookahead", "examples:", "--compare", "--list-methods"):
        assert word in shown


def test_list_methods_describes_each_method_and_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser("generate_gpt.py").parse_args(["--list-methods"])
    assert not end.value.code
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "ngram what followed the longest suffix when it was seen before ngram_min shortest suffix",
        "ngram_max longest suffix that is looked up (4; 1 to 64)",
        "(needs: sequential)",
        "rollback the trunk rolls back where -log p exceeds this (3.0; 0.0 or more)",
        "relaxed, joint, mtjd and bild change the distribution",
    ):
        assert words in shown


@pytest.mark.parametrize("table", [PROPOSERS, VERIFIERS], ids=["methods", "verifiers"])
def test_every_row_states_its_line_and_keys(table: Mapping[str, Any]) -> None:
    for name, part in table.items():
        assert part.line, name
        assert all(key.meaning for key in keys(part.settings_kind)), name


def test_the_pages_tables_are_those_of_the_code() -> None:
    page = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8")
    updated = runpy.run_path(str(ROOT / "tools/docs/method_tables.py"))["updated"]
    assert updated(page) == page, "run python tools/docs/method_tables.py"
