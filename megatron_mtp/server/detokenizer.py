"""Text to tokens and back, safely from several threads: prompts, chats, output as its characters come, stop strings.

Answers in OpenAI's form: updates of the engine in, the objects of both endpoints out, whole or in parts.

tokens    "a"  E2 82  AC    "\\n"   "\\n"
text      "a"         "€"                   a character goes out when all of its bytes are there, and not before it is
                                            known to belong to no stop string, here "\\n\\n", which has ended the output
"""

import inspect
import json
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi.sse import format_sse_event
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from megatron_mtp.data.tokenizer import apply_template, end_tokens
from megatron_mtp.decoding.requests import Update
from megatron_mtp.decoding.sampling import TokenLogprob
from megatron_mtp.server.protocol import APIError, Body, ChatBody, CompletionBody

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 8
"""Newest tokens of a prompt, by which the first new one is written: with a leading space, or inside of a character."""

UNFINISHED = "\ufffd"

LONG = 2**16
"""Characters of a text beyond which it is tokenized alone, so that many such texts leave time for steps."""

COMPOSED = 4
"""Characters that the normal form C makes one of, at most."""

LEAST = -9999.0
"""Log-probability of what is impossible: JSON has no infinity."""

READ_ROLES = ("user", "assistant", "tool", "function")
"""Roles whose messages templates may write in part, such as without what an assistant thought."""

NOTHING: Mapping[str, str] = MappingProxyType({})

DONE = format_sse_event(data_str="[DONE]")


class Detokenizer:
    """Incremental detokenizer; holds back incomplete UTF-8."""

    def __init__(self, backend: Tokenizer | None, context: list[int], hidden: frozenset[int] = frozenset()) -> None:
        self._backend, self._hidden = backend, hidden
        self._stream, self._pending = DecodeStream(skip_special_tokens=True), list[int]()
        if backend is None:
            return
        context = context[-CONTEXT:]
        whole = len(context)
        while whole and backend.decode(context[:whole]).endswith(UNFINISHED):
            whole -= 1  # the last character's first bytes stand in the context
        self._stream = DecodeStream(context[:whole], skip_special_tokens=True)
        for token in context[whole:]:
            self.add(token)

    def add(self, token: int) -> str:
        """The characters that this token completes."""
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
        """The text of bytes that complete no character, at the output's end."""
        pending, self._pending = self._pending, []
        return "" if self._backend is None else self._backend.decode(pending, skip_special_tokens=True)


class StopStrings:
    """Pieces of text in, what may go out; cutting the text into other pieces changes nothing."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held = stops, ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """The new characters that may go out, and the stop string that has ended the text."""
        text, self._held = self._held + piece, ""
        found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, stop = min(found)  # the one that is whole first
            return text[:start], stop
        begun = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        end = len(text) - max(begun, default=0)
        self._held = text[end:]
        return text[:end], None

    def rest(self) -> str:
        """The characters that were held back, of a text that has ended otherwise."""
        held, self._held = self._held, ""
        return held


class TokenText(NamedTuple):
    """A token's part of an output: the characters that it completes, and those that may go out with it."""

    whole: str
    released: str


class OutputText:
    """The tokens of one output, each read once: by the engine where there are stop strings, else by the answer.

    As `Request.cut` it gives the number of tokens to keep, up to the one that completes a stop string; None before.
    Lists must grow from call to call.

    Attributes:
        stops: the stop strings.
        least: they are looked for in what comes after so many tokens.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], least: int = 0) -> None:
        self.stops, self.least, self._detokenizer, self._strings = stops, least, detokenizer, StopStrings(stops)
        self._pieces = list[TokenText]()
        self._end: int | None = None

    def __call__(self, ids: list[int]) -> int | None:
        """Read the tokens that were emitted so far."""
        for place in range(len(self._pieces), len(ids)):
            self.piece(place, ids[place])
        return self._end

    def piece(self, place: int, token: int) -> TokenText:
        """The part of the token at a place; places are read in their order."""
        if place == len(self._pieces):
            whole = self._detokenizer.add(token)
            self._pieces.append(TokenText(whole, self._released(whole)))
        return self._pieces[place]

    def rest(self) -> str:
        """The end of the text, after all tokens: incomplete characters, and what was held back."""
        return self._released(self._detokenizer.rest()) + ("" if self._end is not None else self._strings.rest())

    def _released(self, piece: str) -> str:
        """Nothing goes out behind a stop string."""
        if self._end is not None:
            return ""
        if len(self._pieces) < self.least:
            return piece
        released, stop = self._strings.add(piece)
        if stop is not None:
            self._end = len(self._pieces) + 1
        return released


class Codec:
    """The model's tokenizer, of which only the compiled part is used, which any number of threads may read.

    Without one, text is refused, and outputs have none: clients send and read token ids.

    Attributes:
        backend: the compiled part.
        ends: ids that end a text.

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
        """The tokens of a text, with the tokenizer's own beginning if `special`. Raises APIError, also for too many."""
        if self.backend is None:
            raise APIError("the checkpoint names no tokenizer; send token ids as the prompt.", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise APIError(
                f"the text holds {text[error.start]!a} at character {error.start + 1}, which is no Unicode "
                "character; take it out."
            ) from error
        if self._longest is not None and len(text) > positions * self._longest:
            raise too_long(f"at least {-(-len(text) // self._longest)}", positions)
        with self._long if len(text) > LONG else nullcontext():
            # This function alone lets other threads run meanwhile, and keeps no offsets.
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
        """The tokens of a chat, up to where the answer begins. Raises APIError, also for too many.

        Args:
            messages: their contents are strings. A developer's are the system's where the template has no developer.
            own: arguments of `apply_chat_template`.
            variables: further ones for the template.
            positions: tokens, at most.
            needed: names that the template must read, each by the field that has it.
        """
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            why = "checkpoint names no tokenizer, so it" if self._tokenizer is None else "model's tokenizer"
            raise APIError(f"the {why} has no chat template; use /v1/completions.", "messages")
        known = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()
        if reserved := sorted(variables.keys() & known):
            raise APIError(f"'{reserved[0]}' is no variable of a template; leave it out.", "chat_template_kwargs")
        template = str(self._tokenizer.get_chat_template(tools=own.get("tools")))
        for param, name in needed.items():
            if not _has(template, name):
                raise APIError(f"the model's chat template does not read '{name}'; leave it out.", param)
        if not _has(template, "developer"):
            messages = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
        try:
            text = str(apply_template(self._tokenizer, messages, **{**variables, **own}))
        except Exception as error:  # templates refuse roles and orders by exceptions of Jinja
            raise APIError(f"the chat template refuses these messages: {error}", "messages") from error
        for place, one in enumerate(messages):
            if one["role"] not in READ_ROLES and one["content"].strip() not in text:
                why = f"the model's chat template leaves out a message of the role '{one['role']}'; send another role."
                raise APIError(why, f"messages.{place}.role")
        return self.encode(text, False, positions)

    def special_stops(self, stops: list[str]) -> dict[str, int]:
        """Those stop strings that are special tokens, which have no text, and their ids. Raises APIError."""
        if stops and self.backend is None:
            why = "the checkpoint names no tokenizer to look for stop strings with"
            raise APIError(f"{why}; use stop_token_ids.", "stop")
        special = {added.content: token for token, added in self._added.items() if added.special}
        for stop in (stop for stop in stops if stop not in special):
            for held in (content for content in special if content in stop):
                raise APIError(f"'{held}' is a special token, which has no text; send it as a stop of its own.", "stop")
        return {stop: special[stop] for stop in stops if stop in special}

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without special ones."""
        return "" if self.backend is None else self.backend.decode(ids, skip_special_tokens=True)

    def detokenizer(self, context: list[int]) -> Detokenizer:
        """Reads what continues the context."""
        return Detokenizer(self.backend, context, self.ends)

    def written(self, token: int) -> tuple[str, list[int] | None]:
        """A token on its own, and its bytes; those that are no text are written as OpenAI does, bytes:\\xe2\\x82."""
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
    """True if a template may read a variable or field of this name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def too_long(tokens: str, positions: int) -> APIError:
    """Status 400 for a prompt of so many tokens."""
    return APIError(
        f"the prompt has {tokens} tokens, and the model has {positions} positions for it and the new ones; send less, "
        "or ask for fewer tokens.",
        "prompt",
        "context_length_exceeded",
    )


def longest_token(form: dict[str, Any], backend: Tokenizer) -> int | None:
    """Characters of a text that one token of a byte-level BPE stands for, at most; None where texts may shrink."""
    normalizer = form["normalizer"] or {"normalizers": []}
    parts = normalizer.get("normalizers", [normalizer])
    strips = any(added["lstrip"] or added["rstrip"] for added in form["added_tokens"])
    if strips or any(part["type"] != "NFC" for part in parts):
        return None
    return max(map(len, backend.get_vocab())) * (COMPOSED if parts else 1)


# --- answers


class Delta(NamedTuple):
    """An update's part of an output.

    Attributes:
        text: characters that may go out; fewer than `pieces` have where a stop string may have begun.
        pieces: the characters that each token of the update completes.
        start: characters that the output had before.
    """

    update: Update
    text: str
    pieces: list[str]
    start: int


@dataclass
class Choice:
    """One output of a request.

    Attributes:
        index: its place in the answer.
        prompt: what it continues.
        text: of its tokens; the engine reads it as well where there are stop strings.
        muted: the one token that is computed does not go out: the client wants the prompt's log-probabilities alone.
        tokens: how many it has so far.
    """

    index: int
    prompt: list[int]
    text: OutputText
    muted: bool = False
    deltas: list[Delta] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    tokens: int = 0
    _characters: int = 0

    def take(self, update: Update) -> Delta:
        """Read an update, and keep what it adds."""
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
        self.cached_tokens += update.cached_tokens
        if self.muted:
            update = replace(update, tokens=[], logprobs=[], accepted=0, offered=0)
        pieces = [self.text.piece(place, token) for place, token in enumerate(update.tokens, self.tokens)]
        rest = "" if update.finish is None or self.muted else self.text.rest()
        whole, released = [piece.whole for piece in pieces], "".join(piece.released for piece in pieces)
        self.deltas.append(Delta(update, released + rest, whole, self._characters))
        self.tokens += len(whole)
        self._characters += sum(map(len, whole))
        return self.deltas[-1]


class Answer[AnyBody: Body](ABC):
    """The answer to one body, which grows with the updates of its choices."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: AnyBody, choices: list[Choice], model: str, codec: Codec) -> None:
        self._body, self._choices, self._codec = body, choices, codec
        self._head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, updates: AsyncIterable[tuple[int, Update]]) -> dict[str, Any]:
        """The answer, once all choices have ended."""
        async for place, update in updates:
            self._choices[place].take(update)
        entries = [self._entry(choice, choice.deltas, streamed=False) for choice in self._choices]
        return {**self._head, "object": self.whole_object, "choices": entries, "usage": self._usage()}

    async def events(self, updates: AsyncIterable[tuple[int, Update]]) -> AsyncIterator[bytes]:
        """Server-sent events: of every update that adds something, of the sums if asked for, and [DONE]."""
        for opening in self._openings():
            yield self._event([opening])
        try:
            async for place, update in updates:
                choice = self._choices[place]
                if update.tokens or update.finish is not None:
                    entry = self._entry(choice, [choice.take(update)], streamed=True)
                    sums = _sums(len(choice.prompt), choice.tokens)
                    yield self._event([entry], sums if self._body.stream_options.continuous_usage_stats else None)
        except APIError as error:
            yield format_sse_event(data_str=json.dumps(error.body()))
            return
        if self._body.stream_options.include_usage:
            yield self._event([], self._usage())
        yield DONE

    def _openings(self) -> list[dict[str, Any]]:
        """Entries of a stream that come before all tokens."""
        return []

    @abstractmethod
    def _said(self, choice: Choice, deltas: list[Delta], streamed: bool) -> dict[str, Any]:
        """The text of some of a choice's deltas, with log-probabilities."""

    def _entry(self, choice: Choice, deltas: list[Delta], streamed: bool) -> dict[str, Any]:
        """Some of a choice's deltas: their text, why the choice ended, the weights' version, tokens and drafts."""
        last = deltas[-1].update
        entry = {"index": choice.index, **self._said(choice, deltas, streamed), "finish_reason": last.finish}
        entry["policy_version"] = last.policy_version
        if self._body.return_token_ids:
            entry["token_ids"] = [token for delta in deltas for token in delta.update.tokens]
            entry["prompt_token_ids"] = choice.prompt if deltas[0] is choice.deltas[0] else None
        if self._body.return_drafts:
            entry["drafts"] = [
                {"offered": update.offered, "accepted": update.accepted, "pieces": pieces}
                for update, _, pieces, _ in deltas
            ]
        return entry

    def _event(self, entries: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        written = {**self._head, "object": self.chunk_object, "choices": entries}
        if usage is not None or self._body.stream_options.include_usage:
            written["usage"] = usage
        return format_sse_event(data_str=json.dumps(written, ensure_ascii=False))

    def _usage(self) -> dict[str, Any]:
        prompts = sum(len(choice.prompt) for choice in self._choices[:: self._body.n])
        completion = sum(len(delta.update.tokens) for choice in self._choices for delta in choice.deltas)
        cached = sum(choice.cached_tokens for choice in self._choices)
        return {**_sums(prompts, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def _sums(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class CompletionAnswer(Answer[CompletionBody]):
    """The form of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def _said(self, choice: Choice, deltas: list[Delta], streamed: bool) -> dict[str, Any]:
        prompt = self._codec.decode(choice.prompt) if self._body.echo else ""
        echoed = self._body.echo and deltas[0] is choice.deltas[0]
        text = (prompt if echoed else "") + "".join(delta.text for delta in deltas)
        if self._body.logprobs is None:
            return {"text": text, "logprobs": None}
        listed: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if echoed:
            self._list_prompt(listed, choice)
        for delta in deltas:
            offset = len(prompt) + delta.start
            for one, piece in zip(delta.update.logprobs, delta.pieces, strict=True):
                self._list(listed, one.token, one, offset)
                offset += len(piece)
        return {"text": text, "logprobs": listed}

    def _list_prompt(self, listed: dict[str, Any], choice: Choice) -> None:
        """Add the prompt's tokens; nothing comes before the first one, which has no probability."""
        detokenizer, offset = self._codec.detokenizer([]), 0
        for token, one in zip(choice.prompt, [None, *choice.prompt_logprobs], strict=True):
            self._list(listed, token, one, offset)
            offset += len(detokenizer.add(token))

    def _list(self, listed: dict[str, Any], token: int, one: TokenLogprob | None, offset: int) -> None:
        written, top = self._codec.written, [] if one is None else [*one.top, (one.token, one.logprob)]
        listed["text_offset"].append(offset)
        listed["tokens"].append(written(token)[0])
        listed["token_logprobs"].append(None if one is None else finite(one.logprob))
        listed["top_logprobs"].append({written(id)[0]: finite(logprob) for id, logprob in top} or None)


class ChatAnswer(Answer[ChatBody]):
    """The form of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _openings(self) -> list[dict[str, Any]]:
        """The role of each choice."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None} for one in self._choices]

    def _said(self, choice: Choice, deltas: list[Delta], streamed: bool) -> dict[str, Any]:
        text, logprobs = "".join(delta.text for delta in deltas), None
        if self._body.logprobs:
            listed = [
                {**self._token(one.token, one.logprob), "top_logprobs": [self._token(*entry) for entry in one.top]}
                for delta in deltas
                for one in delta.update.logprobs
            ]
            logprobs = {"content": listed, "refusal": None}
        if streamed:
            return {"delta": {"content": text} if text else {}, "logprobs": logprobs}
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        written, found = self._codec.written(token)
        return {"token": written, "logprob": finite(logprob), "bytes": found}


def finite(logprob: float) -> float:
    """A log-probability for JSON, which has no NaN either: weights that have some make it."""
    return logprob if logprob > LEAST else LEAST
