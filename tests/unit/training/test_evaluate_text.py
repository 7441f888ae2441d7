"""`evaluate`: the flags that turn --text into a corpus; contexts and sources that cannot be counted."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from trained_folders import trained

from megatron_mtp.cli import evaluate, preprocess
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.contexts import MOST_CONTEXTS, by_context, numbers_of_contexts


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("trust", [[], ["--trust-remote-code"]])
def test_the_corpus_uses_the_tokenizers_code_if_it_is_trusted(
    trust: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_bpe(["some words to make a vocabulary of"] * 3, 260, tmp_path / "bpe")
    source = trained(tmp_path / "mcore", tokenizer=tokenizer)
    given: list[str] = []

    def recorded(flags: list[str], _: str) -> int:
        given.extend(flags)
        return 2

    monkeypatch.setattr(preprocess, "main", recorded)
    with pytest.raises(SystemExit):
        evaluate.main(["--load", str(source), "--text", str(tmp_path), *trust], "megatron-mtp evaluate")
    assert [word for word in given if word.startswith("--trust")] == trust


@pytest.mark.usefixtures("megatron")
def test_mock_data_has_no_sources(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(["--load", "x", "--mock-data", "--by-source"], "megatron-mtp evaluate")
    assert "--by-source was given with --mock-data, which has no documents; drop one" in capsys.readouterr().err


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mock-data", "--context-lengths", "64"], "--context-lengths was given with --mock-data, which has no"),
        (["--text", "x", "--by-source", "--context-lengths", "2k"], "--by-source and --context-lengths count the same"),
        (["--text", "x", "--context-lengths", "2m"], "'2m' is not a number of tokens; give one such as 512 or 2k"),
    ],
)
def test_contexts_that_cannot_be_counted_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(["--load", "x", *flags], "megatron-mtp evaluate")
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("megatron")
def test_settings_that_affect_the_figures_have_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seq-length", "64", "--micro-batch-size", "2", "--drafter-blocks", "8"]
    given = evaluate.parser("evaluate").parse_args(["--load", str(trained(tmp_path / "mcore")), *flags])
    assert set(zip(flags[::2], flags[1::2], strict=True)) <= set(pairwise(evaluate._data_flags(given, tmp_path, [])))
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(["--load", "x", "--mock-data", "--drafter-blocks", "0"], "megatron-mtp evaluate")
    assert "--drafter-blocks is 0; give 1 or more." in capsys.readouterr().err


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(("tokens", "batches"), [(65, "2"), (64, "1"), (33, "1")])
def test_a_text_has_as_many_batches_as_its_tokens_have_labels_for(
    tokens: int, batches: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences have 32 tokens, and the last one needs the next token as its label."""
    tokenizer = train_bpe(["some words to make a vocabulary of"] * 3, 260, tmp_path / "bpe")
    source = trained(tmp_path / "mcore", tokenizer=tokenizer)
    monkeypatch.setattr(preprocess, "main", lambda *_: 0)
    monkeypatch.setattr(evaluate, "read_sidecar", lambda _: {"tokens": tokens})
    given = evaluate.parser("evaluate").parse_args(["--load", str(source), "--text", "x", "--seq-length", "32"])
    assert evaluate._data_flags(given, tmp_path, [])[:2] == ["--eval-iters", batches]


def test_a_context_length_of_1k_is_1024_tokens() -> None:
    flags = ["--load", "x", "--context-lengths", "512", "2k", "4k"]
    assert evaluate.parser("evaluate").parse_args(flags).context_lengths == [512, 2048, 4096]


def test_contexts_of_rows() -> None:
    """Seven positions of two rows, whose first documents are 5 and 9; lengths 2 and 4."""
    document_BS = torch.tensor([[5, 5, 6, 6, 6, 6, 6], [9, 9, 9, 9, 9, 9, 9]])
    numbers_BS = numbers_of_contexts(document_BS, [2, 4])
    first, second = 5 * MOST_CONTEXTS, 9 * MOST_CONTEXTS
    assert (numbers_BS - torch.tensor([[first], [second]])).tolist() == [[0, 0, 1, 1, 2, 2, 2]] * 2
    named = by_context({first: "a", first + 2: "b", second: "c"}, [2, 4])
    assert named == {"to 2": {first: "a", second: "c"}, "above 4": {first + 2: "b"}}


@pytest.mark.parametrize("lengths", [(4, 2), (2, 2), (0, 4)])
def test_lengths_that_do_not_rise_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"--mtp-context-lengths is .*; give rising numbers"):
        MTPConfig(mtp_context_lengths=lengths)
