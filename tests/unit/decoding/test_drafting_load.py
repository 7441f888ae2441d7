"""Which modules a checkpoint's model drafts with, and in which precision; conversions draft without training."""

import io
import json
import shutil
from argparse import Namespace
from pathlib import Path

import hf_models
import pytest
import torch
from tokenizers import Tokenizer, models

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.cli import generate as verb
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.decoding import generate, load
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.megatron.checkpoint.iterations import keep_tokenizer, run_tokenizer

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(("dtype", "weights"), [(None, torch.bfloat16), (torch.float32, torch.float32)])
def test_a_converted_model_drafts_in_its_own_precision(
    dtype: torch.dtype | None, weights: torch.dtype, tmp_path: Path
) -> None:
    """With its MTP layers and its tokenizer, before any training here."""
    source = hf_models.make(tmp_path / "hf", "mimo", 1, torch.bfloat16)
    shutil.copytree(train_bpe(["abc"], 258, tmp_path / "tokenizer"), source, dirs_exist_ok=True)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True))
    loaded = load.load_checkpoint(tmp_path / "mcore", dtype=dtype)
    assert {weight.dtype for weight in loaded.runner.model.parameters()} == {weights}
    assert loaded.tokenizer == tmp_path / "mcore" / "hf"
    drafted = generate(loaded.runner, [[1, 2, 3]], 8, speculative={"method": "mtp"})
    if weights == torch.float32:  # bfloat16 rounds several rows differently from one
        assert drafted.token_ids == generate(loaded.runner, [[1, 2, 3]], 8).token_ids
    assert drafted.stats.drafted > 0


def test_a_tokenizer_without_an_end_token_drafts(tmp_path: Path) -> None:
    """Its outputs use up the budget."""
    source = hf_models.make(tmp_path / "hf", "mimo", 1)
    hf_to_mcore(with_tokenizer(source), tmp_path / "mcore", Options(quiet=True))
    for prompt in (["--prompt-ids", "0,1,2"], ["--prompt", "abc"]):
        flags = ["--load", str(tmp_path / "mcore"), *prompt, "--max-new-tokens", "5", "--json"]
        answer = io.StringIO()
        verb.run(verb.parser("generate").parse_args(flags), answer)
        assert len(json.loads(answer.getvalue())["token_ids"]) == 5


def with_tokenizer(folder: Path) -> Path:
    """Return a folder whose tokenizer fits the model's vocabulary, and has no end token."""
    words = Tokenizer(models.WordLevel({"a": 0, "abc": 1, "b": 2}, "a"))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.parametrize("given", ["relative", "removed"])
def test_the_tokenizer_stays_with_the_checkpoint(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export, drafting and evaluation find it from any working directory, even if the run's own is gone."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    train_bpe(["abc"], 258, tmp_path / "words")
    (tmp_path / "words" / "weights.safetensors").write_text("large")
    args = Namespace(tokenizer_model="words")
    keep_tokenizer(args, tmp_path / "runs")
    assert args.tokenizer_model == str(tmp_path / "words")
    if given == "removed":
        shutil.rmtree(tmp_path / "words")
    monkeypatch.chdir("/")
    found = run_tokenizer(args, tmp_path / "runs")
    assert found == tmp_path / "runs" / "tokenizer"
    assert sorted(path.name for path in found.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tokenizer"]


def test_another_tokenizer_replaces_the_kept_one(tmp_path: Path) -> None:
    for entries in (258, 260):
        train_bpe(["abc abd"], entries, tmp_path / str(entries))
        keep_tokenizer(Namespace(tokenizer_model=str(tmp_path / str(entries))), tmp_path)
        kept = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
        assert kept == (tmp_path / str(entries) / "tokenizer.json").read_bytes()
    keep_tokenizer(Namespace(tokenizer_model=str(tmp_path / "tokenizer")), tmp_path)
    assert (tmp_path / "tokenizer" / "tokenizer.json").read_bytes() == kept


def test_a_conversion_that_megatron_cannot_run_is_rejected(tmp_path: Path) -> None:
    source = hf_models.make(tmp_path / "hf", "mimo_v2_flash", 1)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True))
    with pytest.raises(ValueError, match=r"--load is .* cannot run: it has sliding windows"):
        load.load_checkpoint(tmp_path / "mcore")


def test_rows_that_pad_the_vocabulary_are_never_emitted_where_no_tokenizer_tells_their_number(tmp_path: Path) -> None:
    """Regression: 96 tokens in 128 rows: the conversion stores the number; the runner treated all rows as tokens."""
    hf_to_mcore(hf_models.make(tmp_path / "hf", "mimo", 1), tmp_path / "mcore", Options(quiet=True))
    for file in (tmp_path / "mcore" / "hf").glob("tokenizer*"):
        file.unlink()
    runner = load.load_runner(tmp_path / "mcore", dtype=torch.float32)
    assert (runner.vocab_size, runner.model.vocab_size) == (96, 128)
    head_VH = runner.model.output_layer.weight
    with torch.no_grad():
        head_VH[96:] = 100 * head_VH[:32]
    sampling = Sampling(temperature=2.0)
    for speculative in (None, {"method": "mtp"}):
        made = generate(runner, [[1, 2, 3], [4]], 32, sampling, speculative=speculative)
        assert all(token < 96 for text in made.token_ids for token in text)
