"""Streamed characters and stop strings: independent of how tokens arrive, never broken, never too early."""

import json
import math
import pickle
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from parrot import tokenizer_in, words
from tokenizers import Tokenizer, decoders, models

from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.server import ranks
from megatron_mtp.server.answers import finite
from megatron_mtp.server.codec import Codec, longest_token
from megatron_mtp.server.detokenizer import Detokenizer, OutputText, StopStrings

LETTERS = st.text(alphabet="ab €🙂ü\n", max_size=12)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return words(tmp_path_factory.mktemp("tokenizer"))


def read(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.add(token) for token in ids] + [detokenizer.rest()]


@given(prompt=LETTERS, text=LETTERS, cut=st.integers(0, 60))
@example(prompt="€", text="", cut=1)
def test_characters_stay_whole_wherever_the_prompt_ends(codec: Codec, prompt: str, text: str, cut: int) -> None:
    """Even if it ends inside a character, which then belongs to the output."""
    ids = codec.encode(prompt + text, special=False, positions=512)
    cut = min(cut, len(ids))
    whole = codec.decode(ids[:cut]).rstrip("�")
    assert whole + "".join(read(codec.detokenizer(ids[:cut]), ids[cut:])) == prompt + text


def test_the_euro_sign_appears_with_its_last_byte(codec: Codec) -> None:
    ids = codec.encode("a€b", special=False, positions=512)
    assert read(codec.detokenizer([]), ids) == ["a", "", "", "€", "b", ""]
    assert read(codec.detokenizer([]), ids[:3]) == ["a", "", "", "�"], "bytes without an end are said at the end"
    assert read(codec.detokenizer([]), [0, ids[0], 1]) == ["", "a", "", ""], "special tokens are not text"


def test_a_leading_space_depends_on_the_prompt() -> None:
    """A tokenizer like Llama's writes no space before a text's first word, but one before a later word."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -1.0)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    assert read(Detokenizer(backend, []), [1, 2, 1])[:3] == ["a", "b", " a"]
    assert read(Detokenizer(backend, [2]), [1, 2, 1])[:3] == [" a", "b", " a"]


class Rewriting:
    """A backend whose decoder changes text that it has already returned."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "x" * len(ids)


def test_a_decoder_that_rewrites_characters_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    detokenizer = Detokenizer(None, [])
    monkeypatch.setattr(detokenizer, "_backend", Rewriting())
    assert read(detokenizer, [1, 2]) == ["x", "x", ""]


@given(text=st.text(alphabet="abc", max_size=20), stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4),
       min_size=1, max_size=3), borders=st.lists(st.integers(0, 20)))  # fmt: skip
@example(text="abcab", stops=["bcb", "ca"], borders=[1, 2, 3])
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], borders: list[int]) -> None:
    """An output ends before the stop string that is complete first, and no part of it is sent earlier."""
    edges = sorted({0, len(text), *(border for border in borders if border < len(text))})
    strings, out, stop = StopStrings(tuple(stops)), "", None
    for start, end in pairwise(edges):
        released, stop = strings.add(text[start:end])
        out += released
        if stop is not None:
            break
    else:
        out += strings.rest()
    ends = [(end, end - len(one), one) for one in stops for end in range(len(text) + 1) if text[:end].endswith(one)]
    expected = min(ends, default=(0, len(text), None))
    assert (out, stop) == (text[: expected[1]], expected[2])


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    strings = StopStrings(("\n\n", "END"))
    out = [strings.add(piece)[0] for piece in ("a\n", "b\n", "cE", "N", "X", "\n")]
    assert out == ["a", "\nb", "\nc", "", "ENX", ""]
    assert strings.rest() == "\n"


@given(text=st.text(alphabet="ab€", max_size=12), stop=st.text(alphabet="ab€", min_size=1, max_size=3))
def test_the_token_that_completes_a_stop_string_is_kept(codec: Codec, text: str, stop: str) -> None:
    ids = codec.encode(text, special=False, positions=512)
    kept = next((end for end in range(1, len(ids) + 1) if stop in codec.decode(ids[:end])), None)
    at_once = OutputText(codec.detokenizer([]), (stop,))
    assert at_once(ids) == kept
    assert at_once(ids) == kept, "asked again, it says the same"
    growing = OutputText(codec.detokenizer([]), (stop,))
    answers = [growing(ids[:end]) for end in range(1, len(ids) + 1)]
    assert next((answer for answer in answers if answer is not None), None) == kept


@given(text=st.text(alphabet="ab€", max_size=12), stop=st.text(alphabet="ab€", min_size=1, max_size=3))
def test_engine_and_response_decode_each_token_once(codec: Codec, text: str, stop: str) -> None:
    """The engine reads a step before the response does; the output equals what a response alone would send."""
    ids = codec.encode(text, special=False, positions=512)
    alone, shared = (OutputText(codec.detokenizer([]), (stop,)) for _ in range(2))
    reads: list[int] = []
    add = shared._detokenizer.add
    shared._detokenizer.add = lambda token: reads.append(token) or add(token)  # type: ignore[method-assign]
    kept = shared(ids) or len(ids)
    pieces = [[one.piece(place, token) for place, token in enumerate(ids[:kept])] for one in (alone, shared)]
    assert pieces[0] == pieces[1]
    assert alone.rest() == shared.rest()
    assert reads == ids


@pytest.mark.parametrize("least", [0, 4])
def test_other_ranks_end_a_request_at_the_same_token_as_rank_0(
    least: int, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of two ranks must take the same steps; the detokenizer is not sent, but created again."""
    prompt, text = (codec.encode(one, special=False, positions=99) for one in ("€", "abcabcabc"))
    cut = OutputText(codec.detokenizer(prompt), ("bc",), least)
    request = Request(prompt, 9, Sampling(0.5), 7, stop_ids=frozenset({1}), cut=cut, logprobs=2)
    news: list[Any] = [[pickle.loads(pickle.dumps(ranks.sent_request(request)))], [5], None]
    monkeypatch.setattr(ranks, "broadcast", lambda messages, group: news.pop(0))
    monkeypatch.setattr(ranks.signal, "signal", lambda number, handler: None)
    engine = Mock()
    ranks.follow(engine, codec, None)
    assert [call[0] for call in engine.method_calls] == ["add", "step", "cancel", "step"]
    (taken,) = engine.add.call_args.args
    assert replace(taken, cut=None) == replace(request, cut=None)
    assert taken.cut(text) == cut(text) == (6 if least else 3)


def test_single_tokens_as_text_and_bytes(codec: Codec, tmp_path: Path) -> None:
    a, *euro = codec.encode("a€", special=False, positions=512)
    assert codec.written(a) == ("a", [97])
    assert [codec.written(token) for token in euro] == [
        ("bytes:\\xe2", [0xE2]), ("bytes:\\x82", [0x82]), ("bytes:\\xac", [0xAC])
    ]  # fmt: skip
    assert codec.written(0) == ("<|endoftext|>", list(b"<|endoftext|>"))
    assert Codec(None).written(5) == ("token_id:5", None)


def test_byte_tokens_of_other_tokenizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codec = words(tmp_path)
    pieces: dict[int, str] = {3: "▁word", 4: "<0xE2>"}
    monkeypatch.setattr(codec, "_bytes", {})
    monkeypatch.setattr(codec, "backend", type("Backend", (), {"id_to_token": lambda self, token: pieces[token]})())
    assert codec.written(3) == (" word", list(b" word"))
    assert codec.written(4) == ("bytes:\\xe2", [0xE2])


def test_a_tokenizer_without_a_compiled_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = tokenizer_in(tmp_path)
    monkeypatch.setattr(type(tokenizer), "backend_tokenizer", None)
    with pytest.raises(ValueError, match=r"has no tokenizer.json; give one that has"):
        Codec(tokenizer)


def test_other_threads_run_while_a_long_text_is_tokenized(codec: Codec) -> None:
    encoding, turns = threading.Thread(target=codec.encode, args=("a" * 3_000_000, False, 10**7)), 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5


@pytest.mark.parametrize(
    ("normalizer", "strips", "longest"),
    [
        (None, False, 13),
        ({"type": "NFC"}, False, 52),
        ({"type": "Sequence", "normalizers": []}, False, 13),
        ({"type": "Strip", "strip_left": True, "strip_right": True}, False, None),
        (None, True, None),
    ],
)
def test_too_long_prompts_are_rejected_before_tokenization(
    normalizer: dict[str, Any] | None, strips: bool, longest: int | None, codec: Codec
) -> None:
    """The longest token is <|endoftext|>; texts that a normalizer or an added token may shorten are tokenized."""
    assert codec.backend is not None
    form = json.loads(codec.backend.to_str())
    form["normalizer"], form["added_tokens"][0]["rstrip"] = normalizer, strips
    assert longest_token(form, codec.backend) == longest


@pytest.mark.parametrize(("logprob", "written"), [(-1.5, -1.5), (-math.inf, -9999.0), (math.nan, -9999.0)])
def test_a_log_probability_is_a_number_of_json(logprob: float, written: float) -> None:
    assert finite(logprob) == written
