"""/v1/chat/completions: messages in, the next one out, by the tokenizer's chat template, in OpenAI's form."""

from typing import Any

from megatron_mtp.decoding.requests import TokenLogprob
from megatron_mtp.server.answers import Served
from megatron_mtp.server.bodies import ChatBody
from megatron_mtp.server.choices import Choice, Delta, ended, finite


class Chat:
    """The form of this endpoint."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, served: Served) -> None:
        self._body, self._codec = body, served.codec

    def prompts(self) -> list[list[int]]:
        """Token ids of the chat, up to where the answer begins. Raises APIError for what the template refuses."""
        return [self._codec.chat([message.plain() for message in self._body.messages])]

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream says of a text before its tokens: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A text's part of an event."""
        entry = {"index": choice.index, "delta": {"content": delta.text} if delta.text else {}}
        return self._entry(entry, choice, [delta])

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A text's part of the answer."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._entry({"index": choice.index, "message": message}, choice, choice.deltas)

    def _entry(self, entry: dict[str, Any], choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        listed = [self._logprob(one) for delta in deltas for one in delta.logprobs]
        entry["logprobs"] = {"content": listed, "refusal": None} if self._body.logprobs else None
        return entry | ended(self._body, choice, deltas)

    def _logprob(self, one: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in one.top]
        return {**self._token(one.token, one.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        written, found = self._codec.written(token)
        return {"token": written, "logprob": finite(logprob), "bytes": found}
