"""`evaluate --text`: the flags with which the text becomes a corpus."""

from pathlib import Path

import pytest
from test_hf_form import trained

from megatron_mtp.cli import evaluate, preprocess
from megatron_mtp.data.tokenizer import train_bpe


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("trust", [[], ["--trust-remote-code"]])
def test_the_corpus_is_made_with_the_tokenizers_code_where_that_is_trusted(
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
