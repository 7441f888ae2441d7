"""corpus.py, tokenizer.py and tools/data/preprocess.py: text in, Megatron's own readers out.

The literal tokenizer has one token per character: `<eod>` is 0, `a` is 1, `b` is 2, ... `z` is 26, a space 27.
"""

import bz2
import errno
import gzip
import json
import lzma
import os
import signal
import string
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_mtp.cli.preprocess import main
from megatron_mtp.data import corpus, tokenizer
from megatron_mtp.data.corpus import Document, choose_documents, find_files, list_documents
from megatron_mtp.data.tokenizer import Encoder, load_tokenizer, train_bpe

REPOSITORY = Path(__file__).parents[3]
PROSE = [
    f"def depth_{i}(hidden):\n    return [{i} * h for h in hidden]  # größer {chr(0x4E00 + i)} 🎉\n" for i in range(80)
]


def letters_tokenizer(folder: Path, special: bool = True, eos: bool = True) -> Path:
    vocab = {"<eod>": 0, **{letter: i for i, letter in enumerate(string.ascii_lowercase, start=1)}, " ": 27}
    tokenizer = Tokenizer(models.WordLevel(vocab | {"?": 28, "<": 29, ">": 30}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(["<eod>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": "<eod>"} if eos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(*flags: object) -> int:
    return main([str(flag) for flag in flags])


def sequences(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1)), "one sequence per document"
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    return letters_tokenizer(tmp_path / "letters")


# --- output -----------------------------------------------------------------------------------------------------------


def test_each_document_is_its_tokens_then_eod(tmp_path: Path, letters: Path) -> None:
    text = write(tmp_path / "text", {"1.txt": "ab", "2.txt": "", "3.txt": " \n ", "4.txt": "c ba", "no.bin": "zz"})
    prefix = tmp_path / "out/c"
    assert run("--input", text, "--tokenizer", letters, "--output-prefix", prefix, "--no-shuffle", "--workers", 1) == 0
    assert sequences(prefix) == [[1, 2, 0], [3, 27, 2, 1, 0]]
    sidecar = json.loads((tmp_path / "out/c.json").read_text())
    expected = {"documents": 2, "tokens": 8, "max_token_id": 27, "vocab_size": 31, "eod_token": "<eod>", "eod_id": 0}
    assert {name: sidecar[name] for name in expected} == expected
    assert sidecar["bin_bytes"] == 8 * 2 == (tmp_path / "out/c.bin").stat().st_size
    assert sorted(os.listdir(tmp_path / "out")) == ["c.bin", "c.idx", "c.json", "c.sources.npy"]


@pytest.mark.parametrize("special", [True, False])
def test_eod_spelt_out_in_a_text_does_not_end_it(tmp_path: Path, special: bool) -> None:
    """Source files of tokenizers contain "<|endoftext|>" as a string."""
    encode = Encoder.from_folder(letters_tokenizer(tmp_path / "t", special)).start()
    assert encode(["a<eod>b", "<eod>", "ab"]) == [[1, 29, 5, 15, 4, 30, 2], [29, 5, 15, 4, 30], [1, 2]]


def test_eod_that_cannot_be_kept_apart_is_refused(tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture) -> None:
    text = write(tmp_path / "text", {"1.txt": "a b"})
    flags = ("--tokenizer", letters, "--output-prefix", tmp_path / "c", "--eod-token", " ", "--workers", 1)
    assert run("--input", text, *flags) == 2
    assert "--eod-token: ' ' also stands inside documents" in capsys.readouterr().err


def test_output_is_the_same_for_any_number_of_workers(
    tmp_path: Path, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 300)
    text = write(tmp_path / "text", {f"{i}.txt": string.ascii_lowercase[i % 26] * (i + 1) for i in range(60)})
    for workers in (1, 2):
        flags = ("--tokenizer", letters, "--output-prefix", tmp_path / f"w{workers}", "--workers", workers)
        assert run("--input", text, *flags) == 0
    assert (tmp_path / "w1.bin").read_bytes() == (tmp_path / "w2.bin").read_bytes()
    assert (tmp_path / "w1.idx").read_bytes() == (tmp_path / "w2.idx").read_bytes()
    written = sequences(tmp_path / "w1")
    assert sorted(len(s) for s in written) == list(range(2, 62))
    assert [len(s) for s in written] != sorted(len(s) for s in written), "shuffled by default"
    assert all(s[-1] == 0 and 0 not in s[:-1] for s in written)


def test_a_long_file_is_encoded_in_parts_and_stays_one_document(
    tmp_path: Path, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PART_BYTES", 5)
    text = write(tmp_path / "text", {"1.txt": "abcdefgh\n\n\nab", "2.txt": "ééé", "3.txt": "c"})
    parts = [p for d in list_documents(find_files([str(text)], ["*"])) for p in corpus.parts(d)]
    assert [(p.start, p.size, p.ends) for p in parts] == [
        (0, 9, False),  # abcdefgh\n
        (9, 4, True),  # \n\nab
        (0, 6, True),  # five bytes would split the third é
        (0, 1, True),
    ]
    flags = ("--tokenizer", letters, "--output-prefix", tmp_path / "c", "--no-shuffle", "--workers", 1)
    assert run("--input", text, *flags) == 0
    assert sequences(tmp_path / "c") == [[1, 2, 3, 4, 5, 6, 7, 8, 28, 28, 28, 1, 2, 0], [28, 28, 28, 0], [3, 0]]


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "ab"}\n'), "compressed by gzip"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd\x04\x00", "compressed by zstd"),
        ("a.txt", bz2.compress(b"ab"), "compressed by bzip2"),
        ("b.txt", lzma.compress(b"ab"), "compressed by xz"),
        ("c.txt", "ab".encode("utf-16"), "in UTF-16"),
    ],
    ids=["gzip", "zstd", "bzip2", "xz", "utf-16"],
)
def test_a_file_that_is_not_utf_8_text_is_rejected(
    name: str, data: bytes, kind: str, tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture
) -> None:
    """Regression: it was read as text, with replacement characters for invalid bytes."""
    (tmp_path / name).write_bytes(data)
    flags = ("--tokenizer", letters, "--output-prefix", tmp_path / "c", "--workers", 1)
    assert run("--input", tmp_path / name, *flags) == 2
    assert f"--input: '{tmp_path / name}' is {kind}; give it as plain UTF-8 text." in capsys.readouterr().err
    assert not (tmp_path / "c.idx").exists()


def test_jsonl_is_one_document_per_line(tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture) -> None:
    lines = '{"text": "ab", "body": "b"}\n\n{"text": "\\ud800c", "body": "bb"}\r\n{"body": "bbb", "text": ""}'
    text = write(tmp_path / "text", {"a.jsonl": lines})
    common = ("--input", text, "--tokenizer", letters, "--no-shuffle", "--workers", 1)
    assert run(*common, "--output-prefix", tmp_path / "t") == 0
    assert sequences(tmp_path / "t") == [[1, 2, 0], [28, 3, 0]]  # half a surrogate pair becomes "?"
    assert run(*common, "--output-prefix", tmp_path / "b", "--json-key", "body") == 0
    assert sequences(tmp_path / "b") == [[2, 0], [2, 2, 0], [2, 2, 2, 0]]
    assert run(*common, "--output-prefix", tmp_path / "n", "--json-key", "content") == 2
    message = f"--json-key: '{text}/a.jsonl', line 1 has no text under 'content' (it has: text, body)"
    assert message in capsys.readouterr().err
    write(text, {"a.jsonl": '{"text": "a"}\n\n{"text": '})
    assert run(*common, "--output-prefix", tmp_path / "n") == 2
    assert f"--input: '{text}/a.jsonl', line 3 is not JSON" in capsys.readouterr().err


# --- interruption and repetition --------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["while tokenizing", "after the first rename, over an old dataset"])
def test_a_killed_run_leaves_no_index_and_the_next_one_completes(tmp_path: Path, letters: Path, moment: str) -> None:
    import megatron.core.datasets.indexed_dataset  # noqa: F401  (imported here, so that the forked child need not)

    text = write(tmp_path / "text", {"1.txt": "ab", "2.txt": "b"})
    flags = ["--input", text, "--tokenizer", letters, "--output-prefix", tmp_path / "c", "--no-shuffle", "--workers", 1]

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def rename_and_die(source: str, target: str, rename: Callable[[str, str], None] = os.replace) -> None:
        rename(source, target)
        die()

    if moment != "while tokenizing":
        assert run(*flags) == 0
        flags.append("--overwrite")
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hanging child fails the test instead of blocking the suite
        where = (corpus, "_encode_chunk", die) if moment == "while tokenizing" else (os, "replace", rename_and_die)
        with mock.patch.object(*where):
            run(*flags)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    left = os.listdir(tmp_path)
    assert "c.bin.partial" in left or "c.idx.partial" in left
    assert "c.idx" not in left
    assert run(*flags) == 0
    assert sequences(tmp_path / "c") == [[1, 2, 0], [2, 0]]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def test_failure_keeps_the_old_dataset_whole(tmp_path: Path, letters: Path) -> None:
    text = write(tmp_path / "text", {"1.txt": "ab"})
    flags = ("--input", text, "--tokenizer", letters, "--output-prefix", tmp_path / "c", "--workers", 1)
    assert run(*flags) == 0
    write(text, {"2.jsonl": "no json"})
    assert run(*flags, "--overwrite") == 2
    assert sequences(tmp_path / "c") == [[1, 2, 0]]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def test_a_finished_corpus_is_skipped_and_other_settings_rejected(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture
) -> None:
    text = write(tmp_path / "text", {"1.txt": "ab"})
    flags = ["--input", text, "--tokenizer", letters, "--output-prefix", tmp_path / "c", "--workers", 1]
    assert run(*flags) == 0
    made = (tmp_path / "c.idx").stat().st_mtime_ns
    capsys.readouterr()
    assert run(*flags) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path}/c.bin and .idx are already there: 1 documents, 3 tokens")
    assert said.count("\n") == 1
    assert run(*flags, "--seed", 5, "--max-mb", 1) == 2
    assert "is already there, made with another --max-mb, --seed; add --overwrite" in capsys.readouterr().err
    assert (tmp_path / "c.idx").stat().st_mtime_ns == made
    assert run(*flags, "--seed", 5, "--overwrite") == 0
    record = json.loads((tmp_path / "c.json").read_text())
    for damaged in ({"settings": []}, {"tokenizer": 3}, {"tokenizer": None}, {"bin_bytes": "x"}):
        (tmp_path / "c.json").write_text(json.dumps(record | damaged))
        assert run(*flags) == 2
        assert "made by something else, or is no longer whole" in capsys.readouterr().err
    for lacking in ("documents", "tokens", "settings", "tokenizer"):
        (tmp_path / "c.json").write_text(json.dumps({name: record[name] for name in record if name != lacking}))
        assert run(*flags) == 2
    (tmp_path / "c.json").unlink()
    assert run(*flags) == 2
    assert "made by something else, or is no longer whole" in capsys.readouterr().err


# --- which documents are read -----------------------------------------------------------------------------------------


def test_find_files_takes_each_file_once_in_a_fixed_order(tmp_path: Path) -> None:
    write(tmp_path, {"b/2.py": "x", "b/c/1.py": "x", "a.py": "x", "b/n.md": "x", "b/.git/3.py": "x"})
    (tmp_path / "b/loop").symlink_to(tmp_path / "b")
    (tmp_path / "b/again.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "b/also").symlink_to(tmp_path / "b/c")
    (tmp_path / "b/gone.py").symlink_to(tmp_path / "nowhere")
    inputs = [str(tmp_path / "*.py"), str(tmp_path / "b"), str(tmp_path / "b/c")]
    found = [str(path.relative_to(tmp_path)) for path in find_files(inputs, ["*.py"])]
    assert found == ["a.py", "b/.git/3.py", "b/2.py", "b/also/1.py"]
    assert len(list(corpus._walk(str(tmp_path / "b"), ["*.py"], set()))) == 4, "each folder is entered once"
    assert [path.name for path in find_files([str(tmp_path / "b/n.md")], ["*.py"])] == ["n.md"]


def test_choose_documents_samples_by_seed() -> None:
    documents = [Document(f"{i:02}", 0, 10) for i in range(100)]
    sample = choose_documents(documents, 195, seed=1, shuffle=False)
    assert len(sample) == 20
    assert sample == sorted(sample)
    assert sample == sorted(choose_documents(documents, 195, seed=1, shuffle=True))
    assert sample != choose_documents(documents, 195, seed=2, shuffle=False)
    assert {int(document.path) // 25 for document in sample} == {0, 1, 2, 3}, "spread over all of them"
    assert choose_documents(documents, None, seed=1, shuffle=False) == documents


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "{tmp}/none"], "--input: '{tmp}/none' matches no file or folder"),
        (["--input", "{tmp}", "--include", "*.rst"], "--input: no file in '{tmp}' matches --include *.rst"),
        (["--input", "{tmp}/empty.txt"], "--input: every file in '{tmp}/empty.txt' is empty"),
        (["--input", "{tmp}/blank.txt"], "--input: the files hold no text, only blanks"),
        (["--tokenizer", "{tmp}/none"], "--tokenizer: there is no folder '{tmp}/none'"),
        (["--tokenizer", "{tmp}/sub"], "--tokenizer: '{tmp}/sub' holds no tokenizer that transformers can load"),
        (["--eod-token", "<end>"], "--eod-token: '<end>' is not in the vocabulary of '{tmp}/letters'"),
        (["--workers", "0"], "--workers is 0; give 1 or more."),
        (["--max-mb", "0"], "--max-mb is 0.0; give a number above 0"),
        (["--max-mb", "1e308"], "--max-mb is 1e+308; give a number above 0"),
        (["--output-prefix", "{tmp}/new/"], "--output-prefix is '{tmp}/new/'; name the files to write"),
        (["--output-prefix", "{tmp}/."], "--output-prefix is '{tmp}/.'; name the files to write"),
        (["--tokenizer", "", "--vocab-size", "257"], "--vocab-size: 257 is too small; give 258 or more"),
        (["--tokenizer-output", "x"], "--tokenizer-output: 'x' would stay empty"),
    ],
)
def test_mistakes_give_a_clear_error_and_status_2(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture, flags: list[str], message: str
) -> None:
    write(tmp_path, {"a.txt": "ab", "empty.txt": "", "blank.txt": " \n", "sub/config.txt": "x"})
    defaults = ["--input", f"{tmp_path}/a.txt", "--output-prefix", f"{tmp_path}/c", "--workers", "1"]
    if "--vocab-size" not in flags:
        defaults += ["--tokenizer", str(letters)]
    else:
        flags = flags[2:]
    assert run(*defaults, *[flag.format(tmp=tmp_path) for flag in flags]) == 2
    assert f"megatron-mtp preprocess: error: {message.format(tmp=tmp_path)}" in capsys.readouterr().err
    assert not [name for name in os.listdir(tmp_path) if name.startswith("c.")]


def test_tokenizer_without_eos_is_refused_unless_named(tmp_path: Path) -> None:
    folder = letters_tokenizer(tmp_path / "t", eos=False)
    with pytest.raises(ValueError, match=r"no eos_token .*; name one .* with --eod-token"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, eod_token="<eod>").eos_token_id == 0


# --- the trained tokenizer -------------------------------------------------------------------------------------------


def test_bpe_is_deterministic_exact_and_round_trips(tmp_path: Path) -> None:
    folders = [train_bpe(iter(PROSE), 400, tmp_path / name) for name in ("one", "two", "two")]
    assert folders[0].joinpath("tokenizer.json").read_bytes() == folders[1].joinpath("tokenizer.json").read_bytes()
    tokenizer = load_tokenizer(folders[0])
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (400, 0, 1)
    text = " \r\n\tdef \x00 é 漢字 🎉 <|endoftext|><|padding|>"
    ids = Encoder.from_folder(folders[0]).start()([text])[0]
    assert tokenizer.decode(ids) == text
    assert not {0, 1} & set(ids), "special tokens spelt out in a text are text"
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_megatron_builds_the_trained_tokenizer(tmp_path: Path) -> None:
    """The padding token must not be EOD: Megatron masks the loss of padding labels."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    arguments: dict[str, object] = {
        "chat_template": None,
        "vocab_file": None,
        "merge_file": None,
        "special_tokens": None,
    }
    arguments |= {"trust_remote_code": False, "metadata_path": None, "pad_vocab_size": True, "padded_vocab_size": None}
    arguments |= {"tokenizer_hf_no_use_fast": False, "tokenizer_hf_no_include_special_tokens": False, "rank": 1}
    arguments |= {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1}
    arguments |= {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(train_bpe(PROSE, 400, tmp_path / "t")),
    }
    args = SimpleNamespace(**arguments)
    tokenizer = build_tokenizer(args)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad, args.padded_vocab_size) == (400, 0, 1, 512)
    assert tokenizer.tokenize("return [h]") == Encoder.from_folder(tmp_path / "t").start()(["return [h]"])[0]
    assert tokenizer.detokenize(tokenizer.tokenize("größer 🎉")) == "größer 🎉"


def test_preprocess_trains_reuses_and_protects_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = write(tmp_path / "text", {f"{i}.py": source for i, source in enumerate(PROSE)})
    flags = ("--input", text, "--workers", 1, "--output-prefix", tmp_path / "c")
    assert run(*flags, "--vocab-size", 300) == 0
    (tmp_path / "c.idx").unlink()
    assert run(*flags, "--vocab-size", 300) == 0
    assert "taking the one of 300 entries that is already in" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "c-tokenizer")
    assert sorted(tokenizer.decode(s[:-1]) for s in sequences(tmp_path / "c")) == sorted(PROSE)
    (tmp_path / "c.idx").unlink()
    assert run(*flags, "--vocab-size", 301) == 2
    assert "already holds a tokenizer of 300 entries, not 301" in capsys.readouterr().err
    assert run(*flags, "--vocab-size", 50_000, "--overwrite") == 2
    assert "--vocab-size: the corpus has text for only" in capsys.readouterr().err
    assert run(*flags, "--vocab-size", 301, "--tokenizer-output", text, "--overwrite") == 2
    assert f"--tokenizer-output: '{text}' holds other files (0.py, 1.py, 10.py)" in capsys.readouterr().err
    assert (text / "0.py").exists()


def test_a_full_disk_leaves_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "tokenizer.json")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        train_bpe(PROSE, 300, tmp_path / "tokenizer")
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_that_no_text_can_fill_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer with 10^12 entries aborts the process."""
    write(tmp_path / "text", {"1.txt": "ab"})
    flags = ["--input", str(tmp_path / "text"), "--output-prefix", str(tmp_path / "c"), "--vocab-size", "1000000000000"]
    assert main(flags) == 2
    assert "--vocab-size: 1000000000000 is too large; give 20000000 at most" in capsys.readouterr().err


def test_tokenizer_training_can_be_interrupted_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code returns to Python only at its end; its exceptions are passed on."""
    threads: list[threading.Thread] = []
    train = tokenizer.interruptible

    def watched(work: Callable[[], None]) -> None:
        train(lambda: threads.append(threading.current_thread()))
        train(work)

    def gone() -> Iterator[str]:
        yield "some words"
        raise OSError("gone")

    monkeypatch.setattr(tokenizer, "interruptible", watched)
    with pytest.raises(OSError, match="gone"):
        train_bpe(gone(), 260, tmp_path / "bpe")
    assert [one is threading.main_thread() for one in threads] == [False]
    assert not (tmp_path / "bpe").exists()
