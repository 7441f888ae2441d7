"""/v1/completions: prompts in, texts that continue them out, in OpenAI's form."""

from typing import Any

from megatron_mtp.decoding.requests import TokenLogprob
from megatron_mtp.server.answers import Served, check_texts
from megatron_mtp.server.bodies import CompletionBody
from megatron_mtp.server.choices import Choice, Delta, ended, finite
from megatron_mtp.server.errors import refused


class Completions:
    """The form of this endpoint."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, served: Served) -> None:
        self._body, self._codec, self._served = body, served.codec, served

    def prompts(self) -> list[list[int]]:
        """Token ids of all prompts. Raises APIError for what is no prompt."""
        given = self._body.prompt
        if isinstance(given, str) or _are_ids(given):
            given = [given]
        if not isinstance(given, list) or not given:
            raise refused("prompt: give a text, a list of token ids, or a list of these.", "prompt")
        check_texts(len(given) * self._body.n, self._served)  # before they are tokenised
        return [self._ids(one) for one in given]

    def _ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            prompt = self._codec.encode(prompt, self._body.add_special_tokens)
        if not isinstance(prompt, list) or not _are_ids(prompt):
            raise refused("prompt: a prompt is empty, or neither a text nor a list of token ids; correct it.", "prompt")
        return prompt

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream says of a text before its tokens; here the tokens bring the prompt that is echoed."""
        return None

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A text's part of an event."""
        opening = self._body.echo and len(choice.deltas) == 1
        text = (self._codec.decode(choice.prompt) if opening else "") + delta.text
        return self._entry(choice, text, [delta], opening)

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A text's part of the answer."""
        text = (self._codec.decode(choice.prompt) if self._body.echo else "") + choice.text
        return self._entry(choice, text, choice.deltas, self._body.echo)

    def _entry(self, choice: Choice, text: str, deltas: list[Delta], echoed: bool) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": choice.index, "text": text}
        entry["logprobs"] = None if self._body.logprobs is None else self._logprobs(choice, deltas, echoed)
        return entry | ended(self._body, choice, deltas)

    def _logprobs(self, choice: Choice, deltas: list[Delta], echoed: bool) -> dict[str, Any]:
        listed: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        before = len(self._codec.decode(choice.prompt)) if self._body.echo else 0
        if echoed:
            self._list_prompt(listed, choice)
        for delta in deltas:
            offset = before + delta.start
            for one, piece in zip(delta.logprobs, delta.pieces, strict=True):
                self._list(listed, one, offset)
                offset += len(piece)
        return listed

    def _list_prompt(self, listed: dict[str, Any], choice: Choice) -> None:
        """Of the prompt's tokens; nothing comes before the first one, which has no probability."""
        reader, offset = self._codec.reader([]), 0
        for place, token in enumerate(choice.prompt):
            if place:
                self._list(listed, choice.prompt_logprobs[place - 1], offset)
            else:
                for name, value in (("text_offset", 0), ("token_logprobs", None), ("top_logprobs", None)):
                    listed[name].append(value)
                listed["tokens"].append(self._codec.written(token)[0])
            offset += len(reader.add(token))

    def _list(self, listed: dict[str, Any], one: TokenLogprob, offset: int) -> None:
        written = self._codec.written
        top = {written(token)[0]: finite(logprob) for token, logprob in [*one.top, (one.token, one.logprob)]}
        listed["text_offset"].append(offset)
        listed["token_logprobs"].append(finite(one.logprob))
        listed["tokens"].append(written(one.token)[0])
        listed["top_logprobs"].append(top)


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is int for one in given)
