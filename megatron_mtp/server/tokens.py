"""Text to tokens and back, safely from several threads: prompts, chats, letters as they come, single tokens in bytes.

`Ids` is a server without a tokenizer, whose clients send and read token ids; `Words` has one. Both only read the
tokenizer's compiled part, which any number of threads may do.
"""

import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from megatron_mtp.server.errors import refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 8
"""Newest tokens of a prompt that say how the first new one is written: with a leading space, or in the middle of a
letter."""

UNFINISHED = "\ufffd"


class Reader:
    """Tokens of one text in, letters out: each when all of its bytes are there."""

    def __init__(self, backend: Tokenizer | None, context: list[int], hidden: frozenset[int] = frozenset()) -> None:
        self._backend, self._hidden = backend, hidden
        self._stream, self._pending = DecodeStream(skip_special_tokens=True), list[int]()
        if backend is not None:
            self._continue(backend, context[-CONTEXT:])

    def _continue(self, backend: Tokenizer, context: list[int]) -> None:
        """Text goes on after the context, of whose last letter the first bytes may be there."""
        whole = len(context)
        while whole and backend.decode(context[:whole]).endswith(UNFINISHED):
            whole -= 1
        self._stream = DecodeStream(context[:whole], skip_special_tokens=True)
        for token in context[whole:]:
            self.add(token)

    def add(self, token: int) -> str:
        """The letters that this token completes."""
        if self._backend is None or token in self._hidden:
            return ""
        self._pending.append(token)
        try:
            piece = self._stream.step(self._backend, token)
        except Exception:  # the library's own, where a decoder rewrites what it has given out
            self._stream, piece = DecodeStream(skip_special_tokens=True), self.rest()
        if piece:
            self._pending.clear()
        return piece or ""

    def rest(self) -> str:
        """What bytes that complete no letter are written as, at the text's end."""
        pending, self._pending = self._pending, []
        return "" if self._backend is None else self._backend.decode(pending, skip_special_tokens=True)


class Ids:
    """No tokenizer: text is refused, and texts are empty."""

    ends: frozenset[int] = frozenset()
    backend: Tokenizer | None = None

    def encode(self, text: str, special: bool) -> list[int]:
        """The tokens of a text, with the tokenizer's own beginning if `special`. Raises APIError."""
        raise refused("the checkpoint names no tokenizer; send token ids as the prompt.", "prompt")

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of a chat, up to where the answer begins. Raises APIError."""
        raise refused("the checkpoint names no tokenizer, so it has no chat template; use /v1/completions.", "messages")

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without special ones."""
        return ""

    def reader(self, context: list[int]) -> Reader:
        """Reads what continues the context."""
        return Reader(self.backend, context, self.ends)

    def written(self, token: int) -> tuple[str, list[int] | None]:
        """A token on its own as text, and its bytes."""
        return f"token_id:{token}", None


class Words(Ids):
    """A tokenizer.

    Raises:
        ValueError: it has no compiled part.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer is a {type(tokenizer).__name__}, which has no tokenizer.json; give one that has."
            )
        self._tokenizer = tokenizer
        self.backend = backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        self.ends = frozenset([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
        self._added = {number: added.content for number, added in backend.get_added_tokens_decoder().items()}
        self._bytes = _byte_letters() if _is_byte_level(backend) else {}
        self._backend = backend

    def encode(self, text: str, special: bool) -> list[int]:
        """As in `Ids`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise refused(
                f"the text holds {text[error.start]!a} at letter {error.start + 1}, which is no Unicode "
                "character; take it out."
            ) from error
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """As in `Ids`."""
        if self._tokenizer.chat_template is None:
            raise refused("the model's tokenizer has no chat template; use /v1/completions.", "messages")
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates refuse roles and orders by exceptions of Jinja
            raise refused(f"the chat template refuses these messages: {error}", "messages") from error
        return self.encode(str(text), special=False)

    def decode(self, ids: list[int]) -> str:
        """As in `Ids`."""
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def written(self, token: int) -> tuple[str, list[int] | None]:
        """As in `Ids`; bytes that are no text are written as OpenAI does, bytes:\\xe2\\x82."""
        found = self._bytes_of(token)
        try:
            return found.decode(), list(found)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), list(found)

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token) or ""
        if self._bytes and all(letter in self._bytes for letter in piece):
            return bytes(self._bytes[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def _is_byte_level(backend: Tokenizer) -> bool:
    decoder = json.loads(backend.to_str())["decoder"] or {}
    return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]) if part)


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in pieces of a byte-level BPE, to the byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
