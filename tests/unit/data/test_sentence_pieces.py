"""SentencePiece models: stored with a checkpoint, and read with the same ids as the library."""

import io
import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import hf_models
import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers.decoders import DecodeStream
from trained_folders import trained

from megatron_mtp.checkpoint.convert.export_hf import plan_export
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.cli import evaluate, generate
from megatron_mtp.data.tokenizer import Encoder, end_tokens, entries, read_tokenizer
from megatron_mtp.decoding import load
from megatron_mtp.megatron.checkpoint.iterations import SENTENCE_PIECES, keep_tokenizer, run_tokenizer
from megatron_mtp.server.codec import Codec

LINES = ["the cat sat on the mat", "a dog ran in the park", "some more words of text here"] * 5
TEXTS = ["the cat sat", "the  cat é   sat ", " x  y", "", "ünknown 漢 cat", "a</s>b<unk>", "one\ntwo\tthree"]
MODELS = {"unigram": False, "bpe": False, "unigram bytes": True, "bpe bytes": True}


def model(folder: Path, kind: str = "unigram") -> Path:
    """Return a model of 40 pieces, plus 256 bytes if it has byte fallback."""
    folder.mkdir(exist_ok=True)
    has_bytes, file = MODELS[kind], io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=file,
        vocab_size=40 + 256 * has_bytes,
        model_type=kind.split()[0],
        byte_fallback=has_bytes,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(file.getvalue())
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_ids_and_text_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    folder = model(tmp_path, kind)
    library = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer, codec, encode = (
        read_tokenizer(folder),
        Codec(read_tokenizer(folder)),
        Encoder.from_folder(folder).start(),
    )
    for text in TEXTS:
        ids = library.encode(text)
        assert tokenizer(text, add_special_tokens=False).input_ids == codec.encode(text, False, 99) == ids
        assert encode([text]) == [ids]
        stream = DecodeStream(skip_special_tokens=True)
        streamed = "".join(stream.step(tokenizer.backend_tokenizer, one) or "" for one in ids)
        assert tokenizer.decode(ids) == library.decode(ids)
        assert (
            streamed.removeprefix(" ") == codec.decode(ids).removeprefix(" ") == library.decode(ids).removeprefix(" ")
        )
    assert end_tokens(tokenizer) == {2}
    assert entries(tokenizer) == library.get_piece_size()
    assert tokenizer.decode([1, *library.encode("the cat"), 2]) == "the cat"


def test_an_unknown_letter_has_the_id_of_the_model(tmp_path: Path) -> None:
    assert 0 in read_tokenizer(model(tmp_path))("é").input_ids


@pytest.mark.parametrize("kind", [*SENTENCE_PIECES, "TikTokenizer"])
def test_a_model_stays_with_the_checkpoint(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model(tmp_path / "given"))
    shutil.move("tokenizer.model", "mine.model")
    (tmp_path / "run").mkdir()
    args = Namespace(tokenizer_model="mine.model", tokenizer_type=kind)
    keep_tokenizer(args, tmp_path / "run")
    if kind not in SENTENCE_PIECES:
        assert run_tokenizer(args, tmp_path / "run") is None
        return
    assert args.tokenizer_model == str(tmp_path / "given" / "mine.model")
    kept = run_tokenizer(args, tmp_path / "run")
    assert kept == tmp_path / "run" / "tokenizer"
    assert (kept / "tokenizer.model").read_bytes() == (tmp_path / "given" / "mine.model").read_bytes()
    assert read_tokenizer(kept)("the cat").input_ids == read_tokenizer(Path("mine.model"))("the cat").input_ids


def test_a_missing_package_or_damaged_model_gives_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model(tmp_path) / "tokenizer.model"
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "sentencepiece", None)
        with pytest.raises(ValueError, match="a SentencePiece model; pip install sentencepiece"):
            read_tokenizer(tmp_path)
    file.write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"tokenizer\.model is not a SentencePiece .*fetch it again"):
        read_tokenizer(tmp_path)


@pytest.mark.usefixtures("megatron")
def test_text_is_generated_and_exported(tmp_path: Path) -> None:
    source = model(hf_models.make(tmp_path / "hf", "mimo", 1))
    (source / "tokenizer.json").unlink(missing_ok=True)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True))
    flags = ["--load", str(tmp_path / "mcore"), "--prompt", "the  cat é", "--max-new-tokens", "5", "--json"]
    answer = io.StringIO()
    generate.run(generate.parser("generate").parse_args(flags), answer)
    found = json.loads(answer.getvalue())
    assert found["text"] == read_tokenizer(source).decode(found["token_ids"])
    loaded = load.load_checkpoint(tmp_path / "mcore")
    assert loaded.runner.vocab_size == entries(read_tokenizer(source))
    plan = plan_export(tmp_path / "mcore", tmp_path / "back", Options(quiet=True), form_of(tmp_path / "mcore"))
    plan.write(tmp_path / "back", Options(quiet=True))
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()
    assert "encode with sentencepiece" in plan.notes["tokenizer"]


@pytest.mark.usefixtures("megatron")
def test_evaluate_names_the_kept_model_and_its_kind(tmp_path: Path) -> None:
    source = trained(tmp_path / "mcore", tokenizer=model(tmp_path / "given"))
    args = evaluate.parser("evaluate").parse_args(["--load", str(source), "--data-path", "corpus"])
    args.tokenizer_model = str(tmp_path / "given")
    flags = evaluate._data_flags(args, tmp_path, [])
    model_flags = ["SentencePieceTokenizer", "--tokenizer-model", str(tmp_path / "given" / "tokenizer.model")]
    assert flags[1:4] == model_flags
