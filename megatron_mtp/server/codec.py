"""Thread-safe conversion between text and tokens: prompts, chats, stop strings, single tokens."""

import inspect
import json
import re
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from megatron_mtp.data.tokenizer import apply_template, end_tokens
from megatron_mtp.server.detokenizer import Detokenizer
from megatron_mtp.server.protocol import APIError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHARED_CHARS = 2**16
"""Longest text in characters that is tokenized together with others, so that several long prompts leave time for steps.
"""

MAX_COMPOSED_CHARS = 4
"""Most characters that the normal form C combines into one."""

READ_ROLES = ("user", "assistant", "tool", "function")
"""Roles whose messages a template may write only in part, such as an assistant's message without its reasoning."""

NOTHING: Mapping[str, str] = MappingProxyType({})


class Codec:
    """The model's tokenizer. Only its compiled part is used, which any number of threads may read.

    Without a tokenizer, text is rejected and outputs have no text: clients send and read token ids.

    Attributes:
        backend: the compiled part.
        ends: ids that end an output.

    Raises:
        ValueError: the tokenizer has no compiled part.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._tokenizer, self._long = tokenizer, threading.Lock()
        self.backend: Tokenizer | None = None
        self._encoder: Any = None
        self.ends = frozenset[int]()
        self._added, self._bytes = dict[int, AddedToken](), dict[str, int]()
        self._longest: int | None = None
        if tokenizer is None:
            return
        compiled = getattr(tokenizer, "backend_tokenizer", None)
        if compiled is None:
            raise ValueError(
                f"the tokenizer is a {type(tokenizer).__name__}, which has no tokenizer.json; give one that has."
            )
        self.ends = end_tokens(tokenizer)
        self.backend = Tokenizer.from_str(compiled.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self._encoder = self.backend if tokenizer.is_fast else tokenizer
        self._added, form = self.backend.get_added_tokens_decoder(), json.loads(self.backend.to_str())
        decoder = form["decoder"] or {}
        if any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]) if part):
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}
            self._longest = longest_token(form, self.backend)

    def encode(self, text: str, special: bool, positions: int) -> list[int]:
        """Tokenize text, with the tokenizer's own prefix if `special`.

        Raise APIError, also if there are too many tokens.
        """
        if self.backend is None:
            raise APIError("the checkpoint names no tokenizer; send token ids as the prompt.", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise APIError(
                f"the text holds {text[error.start]!a} at character {error.start + 1}, which is not a Unicode "
                "character; take it out."
            ) from error
        if self._longest is not None and len(text) > positions * self._longest:
            raise too_long(f"at least {-(-len(text) // self._longest)}", positions)
        with self._long if len(text) > MAX_SHARED_CHARS else nullcontext():
            # Only this method releases the GIL and computes no offsets.
            (encoded,) = self._encoder.encode_batch_fast([text], add_special_tokens=special)
        if len(encoded.ids) > positions:
            raise too_long(str(len(encoded.ids)), positions)
        return list(encoded.ids)

    def chat(
        self,
        messages: list[dict[str, Any]],
        own: dict[str, Any],
        variables: dict[str, Any],
        positions: int,
        needed: Mapping[str, str] = NOTHING,
    ) -> list[int]:
        """Tokenize a chat up to the start of the response. Raise APIError, also if there are too many tokens.

        Args:
            messages: messages with string contents. Developer messages become system messages if the template has no
                developer role.
            own: arguments of `apply_chat_template`.
            variables: additional template variables.
            positions: maximum number of tokens.
            needed: names that the template must read, by the field that sets each.
        """
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            why = "checkpoint names no tokenizer, so it" if self._tokenizer is None else "model's tokenizer"
            raise APIError(f"the {why} has no chat template; use /v1/completions.", "messages")
        around = apply_template, type(self._tokenizer).apply_chat_template
        parameters = [one for function in around for one in inspect.signature(function).parameters.values()]
        known = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
        if reserved := sorted(variables.keys() & known):
            raise APIError(f"'{reserved[0]}' is not a variable of a template; leave it out.", "chat_template_kwargs")
        template = str(self._tokenizer.get_chat_template(tools=own.get("tools")))
        for param, name in needed.items():
            if not _has(template, name):
                raise APIError(f"the model's chat template does not read '{name}'; leave it out.", param)
        if not _has(template, "developer"):
            messages = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
        try:
            text = str(apply_template(self._tokenizer, messages, **{**variables, **own}))
        except Exception as error:  # chat templates reject roles and their order with various Jinja exceptions
            raise APIError(f"the chat template refuses these messages: {error}", "messages") from error
        for place, one in enumerate(messages):
            if one["role"] not in READ_ROLES and one["content"].strip() not in text:
                why = f"the model's chat template leaves out a message of the role '{one['role']}'; send another role."
                raise APIError(why, f"messages.{place}.role")
        return self.encode(text, False, positions)

    def special_stops(self, stops: list[str]) -> dict[str, int]:
        """Return stop strings that are single tokens without text (special tokens and end tokens) with their ids.

        Raise APIError.
        """
        if stops and self.backend is None:
            why = "the checkpoint names no tokenizer to look for stop strings with"
            raise APIError(f"{why}; use stop_token_ids.", "stop")
        special = {added.content: token for token, added in self._added.items() if added.special or token in self.ends}
        for stop in (stop for stop in stops if stop not in special):
            for held in (content for content in special if content in stop):
                raise APIError(f"'{held}' is a special token, which has no text; send it as a stop of its own.", "stop")
        return {stop: special[stop] for stop in stops if stop in special}

    def decode(self, ids: list[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return "" if self.backend is None else self.backend.decode(ids, skip_special_tokens=True)

    def detokenizer(self, context: list[int]) -> Detokenizer:
        """Create a detokenizer for the continuation of this context."""
        return Detokenizer(self.backend, context, self.ends)

    def written(self, token: int) -> tuple[str, list[int] | None]:
        r"""Return a single token's text and bytes. Bytes that are not text are written as by OpenAI, bytes:\xe2\x82."""
        if self.backend is None:
            return f"token_id:{token}", None
        piece = self.backend.id_to_token(token) or ""
        if token in self._added:
            found = self._added[token].content.encode()
        elif self._bytes and all(character in self._bytes for character in piece):
            found = bytes(self._bytes[character] for character in piece)
        elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            found = bytes([int(piece[3:5], 16)])
        else:
            found = piece.replace("▁", " ").encode()
        try:
            return found.decode(), list(found)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), list(found)


def _has(template: str, name: str) -> bool:
    """Return whether a template may read a variable or field of this name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def too_long(tokens: str, positions: int) -> APIError:
    """Return status 400 for a prompt with this many tokens."""
    return APIError(
        f"the prompt has {tokens} tokens, and there is room for {positions} with the new ones (max_model_len); send "
        "less, or ask for fewer tokens.",
        "prompt",
        "context_length_exceeded",
    )


def longest_token(form: dict[str, Any], backend: Tokenizer) -> int | None:
    """Return the maximum number of characters per token of a byte-level BPE; None if tokenization may shorten text."""
    normalizer = form["normalizer"] or {"normalizers": []}
    parts = normalizer.get("normalizers", [normalizer])
    strips = any(added["lstrip"] or added["rstrip"] for added in form["added_tokens"])
    if strips or any(part["type"] != "NFC" for part in parts):
        return None
    return max(map(len, backend.get_vocab())) * (MAX_COMPOSED_CHARS if parts else 1)
