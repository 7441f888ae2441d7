"""Everything that documents mention exists: files, links, verbs, flags and settings, in sentences, tables and blocks.

tests/functional/test_document_commands.py runs the commands in blocks.
"""

import json
import re
import runpy
from os.path import relpath

import pytest
from documents import DOCUMENTS, DOORS, ENGINES, FENCE, ROOT, SHELLS, blocks, commands, flags_in, launcher, spans

from megatron_mtp.cli.verbs import VERBS

README = DOCUMENTS["README.md"].read_text()
FOLDERS = ("", *"megatron_mtp/**/ tools/**/ scripts/**/ tests/**/ benchmarks/ examples/ docs/**/".split())
FILES = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in ROOT.glob(f"{folder}*.*")]
ELSEWHERE = {"convert_trained.py", "experiments/grug/moe/heuristic.py", "theoretical_memory_usage.py"}
"""Files of other projects."""
PROGRAM = re.compile(r"^(?:\.venv/bin/)?(python|torchrun|megatron-mtp|bash|sbatch) ")


def absent_files(text: str) -> list[str]:
    """Return scripts, modules and pages that a text mentions but do not exist."""
    words = [word.strip(",;:()") for part in (*spans(text), *shown(text)) for word in part.split()]
    named = {word for word in words if re.fullmatch(r"[\w./-]+\.(py|sh|md|txt)", word) and not word.startswith("/")}
    named -= ELSEWHERE
    return sorted(name for name in named if not any(file.endswith(f"/{name}") for file in FILES))


def shown(text: str) -> list[str]:
    """Return the lines of all shell blocks, with continued lines joined."""
    return [line for _, block in blocks(text, *SHELLS) for line in block.replace("\\\n", " ").splitlines()]


def unknown_flags(code: str) -> list[str]:
    """Return flags in code that its command does not take; for a lone flag, that no command takes."""
    known = known_flags(code)
    unset = {f"--no-{flag.removeprefix('--')}" for flag in known & own("train")}  # switches of a config file: flags.py
    return [flag for flag in flags_in(code) if flag not in known | unset]


def known_flags(code: str) -> frozenset[str]:
    """Return flags of the verb, script or `convert` command that the code starts with; all flags if it starts with
    none.
    """
    for engine, flags in ENGINES.items():
        if code.startswith(engine):
            verb = code.partition(" -m megatron_mtp ")[2].partition(" ")[0]
            return frozenset(flags.split()) | (own(verb) if verb else frozenset())
    words = [DOORS.get(word, word) for word in PROGRAM.sub("", code).replace("-m megatron_mtp ", "").split()]
    named = [word for word in words[:8] if word in commands()]
    if "pytest" in words[:2]:
        return frozenset(["--all", "--durations"])
    if words and words[0].startswith(("benchmarks/", "scripts/", "examples/")):
        return literals(words[0])
    if code.startswith("torchrun"):
        return own(named[0]) | launched() if named else launched()
    if named and words[0] == named[0]:
        line = own("train") if "--" in words else frozenset()  # a launch line for `plan`
        return own(named[1] if named[0] == "convert" and len(named) > 1 else named[0]) | line
    return everything()


def own(command: str) -> frozenset[str]:
    return commands()[command]


def launched() -> frozenset[str]:
    """Return torchrun's flags."""
    return frozenset(flag for action in launcher()._actions for flag in action.option_strings)


def literals(script: str) -> frozenset[str]:
    """Return flags that a script without its own parser, or its helpers, mention."""
    texts = [path.read_text() for path in (ROOT / script).parent.glob("*.*")]
    return frozenset(flag for text in texts for flag in re.findall(r"--[\w-]+", text))


def everything() -> frozenset[str]:
    engines = frozenset(flag for flags in ENGINES.values() for flag in flags.split())
    return frozenset(["--all"]).union(*commands().values()) | launched() | engines


def unknown_verbs(code: str) -> list[str]:
    """Return words in the place of a verb that are not one; VERB and `...` match any."""
    named = re.findall(r"(?:^|\s)(?:megatron-mtp|-m megatron_mtp) ([\w.-]+)", code)
    return [verb for verb in named if verb not in (*VERBS, "VERB", "...", "--help", "--version")]


def unmarked_commands(text: str) -> list[str]:
    """Return command lines in blocks that are not marked as commands, and so would not be tested."""
    lines = [line for _, block in blocks(text, "", "text", "console", "shell") for line in block.splitlines()]
    return [line for line in lines if PROGRAM.match(line)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_everything_that_a_document_names_exists(name: str) -> None:
    text = DOCUMENTS[name].read_text()
    code = [*spans(text), *shown(text)]
    assert absent_files(text) == []
    assert [flag for piece in code for flag in unknown_flags(piece)] == []
    assert [verb for piece in code for verb in unknown_verbs(piece)] == []
    assert unmarked_commands(text) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_existing_files(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", DOCUMENTS[name].read_text())
    here = [link for link in links if "://" not in link]
    assert [link for link in here if not (DOCUMENTS[name].parent / link).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_existing_headings(name: str) -> None:
    here = DOCUMENTS[name]
    links = re.findall(r"\]\(([^):]*)#([^)]*)\)", here.read_text())
    pages = {link: (here.parent / link if link else here) for link, _ in links}
    anchors = {link: anchors_of(page.read_text()) for link, page in pages.items() if page.suffix == ".md"}
    assert [f"{link}#{anchor}" for link, anchor in links if link in anchors and anchor not in anchors[link]] == []


def anchors_of(text: str) -> set[str]:
    """Return a page's heading anchors as GitHub makes them: lower case, no punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_of_numbers_have_the_tables_of_the_records() -> None:
    written = runpy.run_path(str(ROOT / "tools/docs/number_tables.py"))
    pages = [page.read_text(encoding="utf-8") for page in written["PAGES"]]
    assert [written["updated"](page) for page in pages] == pages, "run python tools/docs/number_tables.py"
    named = {name for page in pages for name in re.findall(r"<!-- benchmarks/results/(\w+)\.json", page)}
    assert named == {record.stem for record in (ROOT / "benchmarks/results").glob("*.json")}


def test_the_chart_of_the_readme_is_drawn_from_the_records() -> None:
    chart = (ROOT / "docs/chart.svg").read_text(encoding="utf-8")
    chosen = runpy.run_path(str(ROOT / "tools/docs/readme_chart.py"))
    drawn, vocabulary = chosen["rows"], chosen["VOCABULARY"]
    values = [row[side] for row in drawn("mtp_memory") if row[0].endswith(vocabulary) for side in (1, 2)]
    values += [row[side] for row in drawn("serving") for side in (1, 2, 5)]
    assert [value for value in values if f">{value:.3g}</text>" not in chart] == [], "run tools/docs/readme_chart.py"


@pytest.mark.parametrize("name", ["README.md", "docs/get_started/quickstart.md"])
def test_a_page_shows_the_evaluation_of_the_quickstart_as_recorded(name: str) -> None:
    record = json.loads((ROOT / "benchmarks/results/quickstart.json").read_text(encoding="utf-8"))
    (_, trunk, *_), (_, loss, *rates) = record["tables"][0]["rows"]
    page = DOCUMENTS[name].read_text().splitlines()
    shown = [line.strip("| ").split("|") for line in page if re.match(r"\| (trunk|    1) \|", line)]
    (_, trunk_shown, *_), (_, loss_shown, *rates_shown) = shown
    assert [f"{float(trunk_shown):.3f}", f"{float(loss_shown):.3f}"] == [trunk.split()[0], loss.split()[0]]
    assert [rate.strip().replace("%", " %") for rate in rates_shown] == rates


def test_the_readme_leads_to_the_index_and_that_to_every_page() -> None:
    index = DOCUMENTS["docs/index.md"].read_text()
    pages = [path for name, path in DOCUMENTS.items() if name not in ("README.md", "docs/index.md")]
    assert "](docs/index.md)" in README
    assert [page for page in pages if f"]({relpath(page, ROOT / 'docs')})" not in index] == []


def test_no_page_but_a_reference_is_long() -> None:
    lengths = {name: len(FENCE.sub("", path.read_text()).splitlines()) for name, path in DOCUMENTS.items()}
    assert [name for name, lines in lengths.items() if lines > 250 and not name.startswith("docs/reference/")] == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("--no-such-flag", ["--no-such-flag"]),
        ("--mtp-num-layers 2", []),
        ("generate_gpt.py --load X --mtp-num-layers 2", ["--mtp-num-layers"]),
        ("drop-mtp --keep 1", []),
        ("attach-mtp --keep 1", ["--keep"]),
        ("python tools/checkpoint/convert.py drop-mtp a b --mtp-num-layers 1", ["--mtp-num-layers"]),
        ("torchrun --nproc-per-node 2 pretrain_gpt.py --mtp-num-layers 2 --record x", ["--record"]),
        ("torchrun --nproc-per-nodes 2 -m megatron_mtp evaluate --text x", ["--nproc-per-nodes"]),
        ("python benchmarks/shift.py --slots 3", ["--slots"]),
        ("vllm serve x --speculative-method mtp", ["--speculative-method"]),
    ],
)
def test_unknown_flags_are_seen(code: str, wrong: list[str]) -> None:
    assert unknown_flags(code) == wrong


def test_missing_files_and_unknown_verbs_are_detected() -> None:
    text = (
        "`scripts/no_such.sh` and `training/run.py`\n```bash\npython no_such.py\n```\n```\nbash scripts/test.sh\n```\n"
    )
    assert absent_files(text) == ["no_such.py", "scripts/no_such.sh"]
    assert unmarked_commands(text) == ["bash scripts/test.sh"]
    assert unknown_verbs("megatron-mtp trian ...") == ["trian"]
