"""`megatron-mtp sample`: prompts by seed, outputs equal to `generate`, a file that survives kills, a corpus."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import make
from judged_models import QUIET
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli import main as cli
from megatron_mtp.data.checks import part_of, read_sidecar
from megatron_mtp.data.prompts import Beginnings, UserTurns
from megatron_mtp.data.samples import Sample, appended, read_samples
from megatron_mtp.data.tokenizer import read_tokenizer, train_bpe
from megatron_mtp.decoding import generate, load_runner
from megatron_mtp.decoding.sampling import Sampling

pytestmark = pytest.mark.usefixtures("megatron")

EOD, POSITIONS = 0, 64
CORPUS = ["own.bin", "own.idx", "own.json", "own.answers.npy", "own.sources.npy"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a random Llama without MTP layers, a random GLM-4 MoE with two, a tokenizer, and 50 documents."""
    place = tmp_path_factory.mktemp("own")
    texts = [f"{number:02} is a document of {number % 7} tokens and {'more ' * (number % 5)}\n" for number in range(50)]
    train_bpe(texts, 258, place / "tokenizer")
    for number, text in enumerate(texts):
        (place / "texts").mkdir(exist_ok=True)
        (place / "texts" / f"{number:02}.txt").write_text(text)
    sizes = {"vocab_size": 258, "max_position_embeddings": POSITIONS}
    for name, family, depths in (("plain", "llama", 0), ("drafting", "glm4_moe", 2)):
        hf_to_mcore(make(place / f"hf-{name}", family, depths, changes=sizes), place / name, QUIET)
    given = ["--input", str(place / "texts"), "--tokenizer", str(place / "tokenizer")]
    assert cli.main(["preprocess", *given, "--output-prefix", str(place / "corpus"), "--workers", "1"]) == 0
    return place


@pytest.fixture
def sample(scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*flags: object, model: str = "plain", data: bool = True) -> tuple[int, str, str]:
        given = ["--load", scene / model, "--tokenizer", scene / "tokenizer", "--output-prefix", tmp_path / "own"]
        given += ["--data-path", scene / "corpus", "--prompt-tokens", 8] if data else []
        status = cli.main(["sample", *map(str, (*given, "--max-new-tokens", 12, *flags))])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def documents(prefix: Path) -> list[list[int]]:
    return [ids.tolist() for ids in IndexedDataset(str(prefix))]


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_each_document_of_the_split_is_a_prompt_once_per_round(scene: Path) -> None:
    corpus = documents(scene / "corpus")
    prompts = Beginnings(str(scene / "corpus"), 8, 1, "80,20,0", "validation")
    drawn = [prompts.prompt(number) for number in range(20)]
    assert prompts.documents == 10
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(document[:8] for document in corpus[40:])
    assert drawn[:10] != drawn[10:]  # a different order
    again = Beginnings(str(scene / "corpus"), 8, 1, "80,20,0", "validation")
    assert [again.prompt(number) for number in (7, 3)] == [drawn[7], drawn[3]]
    assert [Beginnings(str(scene / "corpus"), 8, 2, "80,20,0", "validation").prompt(n) for n in range(20)] != drawn


def test_prompts_from_anywhere_are_pieces_of_documents_without_their_end(scene: Path) -> None:
    corpus = documents(scene / "corpus")
    prompts = Beginnings(str(scene / "corpus"), 8, 1, "1", "training", anywhere=True)
    drawn = [prompts.prompt(number) for number in range(60)]
    pieces = {tuple(ids[start : start + 8]) for ids in corpus for start in range(len(ids) - 8)}
    assert {tuple(prompt) for prompt in drawn} <= pieces
    assert not any(EOD in prompt for prompt in drawn)
    assert len({tuple(prompt) for prompt in drawn} - {tuple(document[:8]) for document in corpus}) > 30


def test_documents_are_longer_than_their_prompts(scene: Path) -> None:
    longest = max(map(len, documents(scene / "corpus")))
    assert Beginnings(str(scene / "corpus"), longest - 1, 1, "1", "training").documents
    with pytest.raises(ValueError, match=f"--prompt-tokens is {longest}, and none of the 50 documents"):
        Beginnings(str(scene / "corpus"), longest, 1, "1", "training")


@pytest.mark.parametrize(
    ("split", "part", "found"),
    [("98,2,0", "training", (0, 49)), ("98,2,0", "validation", (49, 50)), ("1", "training", (0, 50))],
)
def test_dataset_parts_match_megatrons_split(split: str, part: str, found: tuple[int, int]) -> None:
    assert part_of(50, split, part) == range(*found)


def test_prompts_of_chats_end_where_the_answer_begins(scene: Path, tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in turns]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    tokenizer = read_tokenizer(scene / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    prompts = UserTurns([str(tmp_path / "chats.jsonl")], tokenizer, 1, "1", "training")
    said = [tokenizer.decode(prompts.prompt(number)) for number in range(3)]
    assert said[0] == said[2] == "user: a\nassistant:"
    assert said[1] == "user: a\nassistant: b\nuser: c\nassistant:"


def test_a_line_of_speed_bench_asks_its_first_turn_and_names_its_category(scene: Path, tmp_path: Path) -> None:
    """The second turn refers to the answer to the first, which the line does not have."""
    line = {"question_id": "7", "category": "coding", "sub_category": "x", "source": "y", "src_id": "z"}
    line |= {"turns": ["a", "b"], "difficulty": "hard", "multiturn": True}
    (tmp_path / "bench.jsonl").write_text(json.dumps(line) + "\n")
    tokenizer = read_tokenizer(scene / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    prompts = UserTurns([str(tmp_path / "bench.jsonl")], tokenizer, 1, "1", "training")
    assert [tokenizer.decode(prompts.prompt(number)) for number in range(2)] == ["user: a\nassistant:"] * 2
    assert prompts.source(1) == "coding"


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["plain", "drafting"])
def test_texts_are_those_of_generate_by_number_and_become_documents(
    model: str, sample: Callable[..., tuple[int, str, str]], scene: Path, tmp_path: Path
) -> None:
    status, shown, said = sample("--texts", 6, "--batch-size", 2, model=model)
    assert status == 0, said
    assert "6 samples, " in shown
    assert ("tokens per forward" in shown) == (model == "drafting")
    runner, sampling = load_runner(scene / model, 258), Sampling(0.7)
    prompts = Beginnings(str(scene / "corpus"), 8, 1234, "98,2,0", "training")
    config = {"method": "mtp"} if model == "drafting" else None
    expected = []
    for number in range(6):
        prompt = prompts.prompt(number)
        seeds = [(1234 << 32) + number]
        (made,) = generate(runner, [prompt], 12, sampling, config, seeds, {EOD}).token_ids
        ids = [*prompt, *made]
        expected.append([*(ids[:-1] if ids[-1] == EOD else ids), EOD])
    assert documents(tmp_path / "own") == expected
    made_by = read_sidecar(str(tmp_path / "own"))
    assert made_by["documents"] == 6
    assert made_by["settings"]["texts"] == 6
    assert {"load", "seed", "temperature", "data-path"} <= made_by["settings"].keys()
    kept = [json.loads(line) for line in (tmp_path / "own.texts.jsonl").read_text().splitlines()[1:]]
    ends = {text["number"]: 8 + len(text["tokens"]) for text in kept}
    assert np.load(tmp_path / "own.answers.npy").tolist() == [[8, ends[number]] for number in range(6)]
    new = sum(len(ids) for ids in expected) - 6 * 8 - sum(len(ids) == 8 + 12 + 1 for ids in expected)
    assert f"6 samples, {sum(map(len, expected))} tokens, {new} of them new" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*CORPUS, "own.texts.jsonl"])


def test_a_killed_command_loses_no_finished_text_and_resumes(
    sample: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves a truncated file and no corpus: here at the end of a line, and inside others."""
    assert sample("--texts", 6)[0] == 0
    whole, file = documents(tmp_path / "own"), tmp_path / "own.texts.jsonl"
    data = file.read_bytes()
    lines = data.splitlines(keepends=True)
    for cut, kept in ((len(data) // 2, None), (len(lines[0] + lines[1]), 1), (len(lines[0]) + 7, 0), (9, 0)):
        for name in CORPUS:
            (tmp_path / name).unlink()
        file.write_bytes(data[:cut])
        if kept is not None:
            assert f"{kept} of them finished" in sample("--texts", 6, "--dry-run")[1]
        assert sample("--texts", 6)[0] == 0
        assert documents(tmp_path / "own") == whole
        assert "6 of them finished" in sample("--texts", 8, "--dry-run")[1]  # a truncated line is removed
    status, shown, _ = sample("--texts", 6)
    assert (status, "already there" in shown) == (0, True)
    assert sample("--texts", 8)[0] == 0
    assert documents(tmp_path / "own")[:6] == whole
    assert len(documents(tmp_path / "own")) == 8


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--temperature", 0.9], "another --temperature;"),
        (["--seed", 3, "--top-k", 5], "another --seed, --top-k;"),
        (["--max-new-tokens", 9], "another --max-new-tokens;"),
    ],
)
def test_texts_of_other_settings_are_refused(
    flags: list[object], named: str, sample: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert sample("--texts", 2)[0] == 0
    before = (tmp_path / "own.texts.jsonl").read_bytes()
    for dry in ([], ["--dry-run"]):
        status, _, said = sample("--texts", 2, *flags, *dry)
        assert (status, said.count("\n")) == (2, 1)
        assert named in said
    assert (tmp_path / "own.texts.jsonl").read_bytes() == before
    assert sample("--texts", 2, *flags, "--overwrite")[0] == 0


def test_log_probabilities_are_those_of_a_plain_forward(
    sample: Callable[..., tuple[int, str, str]], scene: Path, tmp_path: Path
) -> None:
    flags = ("--texts", 3, "--temperature", 0.6, "--dtype", "float32")
    assert sample(*flags, "--logprobs", model="drafting")[0] == 0
    model = load_model(scene / "drafting")
    for line in (tmp_path / "own.texts.jsonl").read_text().splitlines()[1:]:
        text = json.loads(line)
        ids_BS = torch.tensor([text["prompt"] + text["tokens"]])
        positions_BS = torch.arange(ids_BS.size(1))[None]
        with torch.no_grad():
            logprobs_SV = model(ids_BS, positions_BS, None)[0, :, :258].log_softmax(-1)
        new = len(text["tokens"])
        expected = logprobs_SV[-new - 1 : -1].gather(1, ids_BS[0, -new:, None])[:, 0]
        assert text["logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
    status, _, said = sample(*flags, model="drafting")
    assert status == 2
    assert "samples made with another --logprobs" in said


def test_another_model_is_refused(sample: Callable[..., tuple[int, str, str]]) -> None:
    assert sample("--texts", 2)[0] == 0
    status, _, said = sample("--texts", 2, model="drafting")
    assert status == 2
    assert "another --load;" in said


def test_a_dry_run_writes_nothing(sample: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, shown, _ = sample("--texts", 5, "--dry-run")
    assert status == 0
    assert shown.startswith("5 samples of 49 documents, 0 of them finished\nat most 60 new tokens\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--texts", 0], "--texts is 0; give 1 or more"),
        (["--texts", 2, "--seed", -1], "--seed is -1"),
        (["--texts", 2, "--temperature", -1], "--temperature is -1.0"),
        (["--texts", 60, "--temperature", 0], "repeat after these"),
        (["--texts", 2, "--prompt-tokens", 5000], "none of the 49 documents"),
        (["--texts", 2, "--part", "testing"], "leaves none for testing"),
        (["--texts", 2, "--load", "nowhere"], "nowhere does not exist"),
        (["--texts", 2, "--data-path", "nowhere"], "there is no dataset 'nowhere'"),
        (["--texts", 2, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": "auto"}'], "measured"),
        (["--texts", 2, "--speculative-config", '{"method": "mtp"}'], "has no MTP weights"),
    ],
)
def test_bad_input_is_rejected_with_a_clear_error(
    flags: list[object], says: str, sample: Callable[..., tuple[int, str, str]]
) -> None:
    status, shown, said = sample(*flags)
    assert (status, shown) == (2, "")
    assert says in said
    assert said.splitlines()[-1].startswith("megatron-mtp sample: error: ")
    assert "Traceback" not in said


def test_texts_are_not_written_into_the_model(
    sample: Callable[..., tuple[int, str, str]], scene: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(scene / "plain")
    for place in (scene / "plain", tmp_path / "link" / "data"):
        status, _, said = sample("--texts", 2, "--output-prefix", place / "own")
        assert (status, said.count("\n")) == (2, 1)
        assert "own.texts.jsonl is inside" in said
    assert sample("--texts", 2, "--output-prefix", scene / "plain", "--dry-run")[0] == 0  # files next to the folder


def test_chat_without_a_template_is_refused(sample: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    status, _, said = sample("--texts", 2, "--chat", tmp_path / "chats.jsonl", data=False)
    assert status == 2
    assert "has no chat template" in said


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"seed": 1}
    file = tmp_path / "own.texts.jsonl"
    with appended(file, settings) as keep:
        for number in range(3):
            keep(Sample(number, [1], [2], "stop"))
    file.write_bytes(file.read_bytes().replace(b'"number":1', b'"nombre":1'))
    with pytest.raises(ValueError, match="is damaged in line 3; remove the line"):
        read_samples(file, settings)
