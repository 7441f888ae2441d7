"""Tokenizers: train a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909), load any Hugging Face folder, encode.

Plain SentencePiece models can be read too (sentence_pieces.py).

In:  an iterable of texts, or a folder with a tokenizer.
Out: a folder that both `transformers.AutoTokenizer` and Megatron's `--tokenizer-type HuggingFaceTokenizer
     --tokenizer-model FOLDER` load, and an `Encoder` that turns texts into token ids inside a worker process.

`transformers` takes seconds to import, so it is imported inside functions, and a worker starts without it.
"""

import copy
import functools
import json
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_mtp.common.files import written_beside
from megatron_mtp.data.sentence_pieces import SentencePieces, model_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOD_TOKEN = "<|endoftext|>"
# Megatron masks the loss of labels that are the padding token, so padding and document end must have different ids.
PAD_TOKEN = "<|padding|>"
SMALLEST_VOCAB = 256 + 2  # every byte, EOD_TOKEN and PAD_TOKEN
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
GENERATION_CONFIG = "generation_config.json"
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings of a generation config, with the values that change nothing."""

Encode = Callable[[list[str]], list[list[int]]]


def train_bpe(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Path:
    """Train a byte-level BPE, save it to a folder and return the folder. The same texts always give the same files.

    The vocabulary has exactly `vocab_size` entries: `<|endoftext|>` (id 0, the end of a document), `<|padding|>` (id
    1), the 256 bytes, then the merges. Encoding and decoding returns every string unchanged.

    Raises:
        ValueError: `vocab_size` is below 258, or there is too little text to fill it; `folder` has other files.
    """
    folder = Path(folder)
    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(
            f"--vocab-size: {vocab_size} has no room for the 256 bytes and 2 special tokens; "
            f"give {SMALLEST_VOCAB} or more."
        )
    if others := sorted({path.name for path in folder.iterdir()} - TOKENIZER_FILES) if folder.exists() else []:
        raise ValueError(
            f"--tokenizer-output: '{folder}' holds other files ({', '.join(others[:3])}) that would be lost; "
            "name a folder of its own."
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN, PAD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    interruptible(lambda: bpe.train_from_iterator(texts, trainer))
    if bpe.get_vocab_size() < vocab_size:
        raise ValueError(
            f"--vocab-size: the corpus has text for only {bpe.get_vocab_size()} of {vocab_size} entries; "
            f"give --vocab-size {bpe.get_vocab_size()} or less, or more text in --input."
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOD_TOKEN,
        "eos_token": EOD_TOKEN,
        "pad_token": PAD_TOKEN,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    with written_beside(folder) as partial:  # readers see the complete tokenizer or nothing
        partial.mkdir(parents=True)
        (partial / "tokenizer.json").write_text(bpe.to_str(pretty=True), encoding="utf-8")
        (partial / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def interruptible(work: Callable[[], None]) -> None:
    """Run compiled code, which returns to Python only at its end, in a thread, so that this one can receive Ctrl-C."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failed:
        raise failed[0]


def load_tokenizer(
    folder: str | Path, eod_token: str | None = None, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Load a local Hugging Face tokenizer whose `eos_token` ends documents, without network access.

    Args:
        eod_token: replaces the folder's own `eos_token`.

    Raises:
        ValueError: there is no such folder, tokenizer or `eos_token`, or `eod_token` is not in the vocabulary.
    """
    if not os.path.isdir(folder) and model_in(Path(folder)) is None:
        raise ValueError(
            f"--tokenizer: there is no folder '{folder}'; give a Hugging Face tokenizer folder, or leave the flag out."
        )
    try:
        tokenizer = read_tokenizer(Path(folder), trust_remote_code)
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from error
    if eod_token is not None:
        if eod_token not in tokenizer.get_vocab():
            raise ValueError(
                f"--eod-token: '{eod_token}' is not in the vocabulary of '{folder}'; "
                f"give one of its tokens, such as {tokenizer.all_special_tokens or 'its end-of-text token'}."
            )
        tokenizer.eos_token = eod_token
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"--tokenizer: '{folder}' names no eos_token to end documents with; "
            "name one of its tokens with --eod-token."
        )
    return tokenizer


def read_tokenizer(folder: Path, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load a folder's tokenizer with transformers, without an interactive question about the folder's code.

    A folder with only a SentencePiece model, or the path of such a model, is loaded with sentencepiece.

    Raises:
        ValueError: it cannot be loaded, or not without its code.
    """
    if (model := model_in(folder)) is not None:
        return SentencePieces(model)
    from transformers import AutoTokenizer

    auto_map = None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # each tokenizer class raises its own: OSError, ValueError, KeyError, ImportError
        with suppress(ValueError):
            auto_map = _object_in(folder / "tokenizer_config.json").get("auto_map")
        if not trust_remote_code and isinstance(auto_map, dict) and "AutoTokenizer" in auto_map:
            raise ValueError(
                f"the tokenizer in '{folder}' is a class of its own, whose code is run only with --trust-remote-code; "
                "read it, and give the flag."
            ) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"'{folder}' holds no tokenizer that transformers can load ({reason:.200}); give a folder with "
            "tokenizer.json and tokenizer_config.json."
        ) from error


def entries(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the number of ids: the highest id plus one, even if ids have gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def end_tokens(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the ids that end an output: the tokenizer's eos and every `eos_token_id` in the model folder's files.

    A chat model ends its turns with ids from generation_config.json or config.json, in addition to the eos of the
    tokenizer, which may only end documents.
    """
    folder = Path(tokenizer.name_or_path)
    config, generation = _object_in(folder / "config.json"), _object_in(folder / GENERATION_CONFIG)
    named = [tokenizer.eos_token_id]
    for found in (config, config.get("text_config"), generation):
        ids = found.get("eos_token_id") if isinstance(found, dict) else None
        named += ids if isinstance(ids, list) else [ids]
    return frozenset(one for one in named if type(one) is int)


def sampling_defaults(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Return the sampling settings of generation_config.json in the tokenizer's folder, without neutral values."""
    found = _object_in(Path(tokenizer.name_or_path) / GENERATION_CONFIG)
    given = {name: found[name] for name in NEUTRAL if found.get(name) is not None}
    return {name: value for name, value in given.items() if value != NEUTRAL[name]}


def _object_in(file: Path) -> dict[str, Any]:
    """Return a JSON file's object; empty without the file. Raise ValueError for a file without an object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object; fetch or write it again.")
    return found


def _decoded_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose tool calls have arguments as objects; clients often send them as JSON.

    Raises:
        ValueError: arguments are not JSON.
    """
    decoded = [copy.deepcopy(message) if message.get("tool_calls") else message for message in messages]
    for place, message in enumerate(decoded):
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            if isinstance(function, dict) and isinstance(given := function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(given or "{}")
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"arguments of a call in messages.{place} are not JSON ({error}); correct them."
                    ) from error
    return decoded


def apply_template(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], **arguments: Any) -> str:
    """Apply transformers' chat template to messages, whose calls may have their arguments as JSON."""
    return _applied(tokenizer, messages, arguments)[0]


def generated_spans(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], **arguments: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of `apply_template`, and start and end (exclusive) of every {% generation %} block."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[_applied(tokenizer, messages, arguments)[1]],
        chat_template=tokenizer.get_chat_template(tools=arguments.get("tools")),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **arguments},
    )
    return str(texts[0]), [(int(start), int(stop)) for start, stop in spans[0]]


def _applied(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> tuple[str, list[dict[str, Any]]]:
    """Render messages, with arguments of calls as objects, or else as JSON; return the text and the form used.

    A template that joins them as text, such as DeepSeek-V3's, fails with objects, or writes them as Python does.
    """
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **arguments)
    decoded = _decoded_calls(messages)
    with suppress(TypeError) if decoded != messages else nullcontext():
        text = str(render(decoded))
        if decoded == messages or not any(_is_python(one, text) for message in decoded for one in _arguments(message)):
            return text, decoded
    return str(render(messages)), messages


def _arguments(message: dict[str, Any]) -> list[dict[str, Any]]:
    functions = [call.get("function") for call in message.get("tool_calls") or ()]
    given = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return [one for one in given if isinstance(one, dict)]


def _is_python(value: dict[str, Any], text: str) -> bool:
    return str(value) in text and str(value) != json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Encoder:
    """A picklable tokenizer for worker processes.

    Attributes:
        folder: folder of the tokenizer.
        eod_token, eod_id: the token that ends a document; no text is encoded to it.
        vocab_size: number of ids.
        backend_json: a fast tokenizer as JSON, so that a worker does not import `transformers`; None for a slow one.
        trust_remote_code: whether to run the folder's Python code.
    """

    folder: str
    eod_token: str
    eod_id: int
    vocab_size: int
    backend_json: str | None
    trust_remote_code: bool = False

    @classmethod
    def from_folder(
        cls, folder: str | Path, eod_token: str | None = None, trust_remote_code: bool = False
    ) -> "Encoder":
        """Load the tokenizer of a folder; arguments and errors as in `load_tokenizer`."""
        tokenizer = load_tokenizer(folder, eod_token, trust_remote_code)
        return cls(
            folder=os.path.abspath(folder),
            eod_token=str(tokenizer.eos_token),
            eod_id=int(tokenizer.eos_token_id),
            vocab_size=entries(tokenizer),
            backend_json=tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None,
            trust_remote_code=trust_remote_code,
        )

    def start(self) -> Encode:
        """Return a function that encodes a list of texts to a list of id lists, without BOS, EOS or the EOD id.

        The function raises ValueError if a text contains the EOD token and cannot be encoded without its id.
        """
        encode = self._fast(self.backend_json) if self.backend_json is not None else self._slow()
        return lambda texts: [
            self._without_eod(encode, text, ids) for text, ids in zip(texts, encode(texts), strict=True)
        ]

    def _fast(self, backend_json: str) -> Encode:
        backend = Tokenizer.from_str(backend_json)
        backend.no_truncation()
        backend.no_padding()
        # The text "<|endoftext|>" in a source file must not end the document.
        backend.encode_special_tokens = True
        return lambda texts: [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _slow(self) -> Encode:
        tokenizer = load_tokenizer(self.folder, self.eod_token, self.trust_remote_code)
        return lambda texts: [
            tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in texts
        ]

    def _without_eod(self, encode: Encode, text: str, ids: list[int]) -> list[int]:
        """Encode a text again with its EOD tokens cut in two, if the tokenizer has produced the EOD id.

        This happens if the token is not marked special, or is a whole piece of a Unigram model: "a</s>b" is then
        encoded as "a<" followed by "/s>b".
        """
        if self.eod_id not in ids:
            return ids
        pieces = text.split(self.eod_token)
        halves = [
            (self.eod_token[1:] if number else "") + piece + (self.eod_token[:1] if number < len(pieces) - 1 else "")
            for number, piece in enumerate(pieces)
        ]
        ids = [i for half_ids in encode([half for half in halves if half]) for i in half_ids]
        if self.eod_id in ids:
            raise ValueError(
                f"--eod-token: '{self.eod_token}' also stands inside documents, so it cannot mark their ends; "
                "name a special token of the tokenizer."
            )
        return ids
