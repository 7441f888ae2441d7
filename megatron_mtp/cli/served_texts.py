"""Sampling from an OpenAI-compatible server: vLLM, SGLang, `megatron-mtp serve` and others.

In:  numbered prompts as token ids for /v1/completions; chats are rendered with the local chat template.
Out: samples with token ids, checked against the local tokenizer.

The client retries 408, 409, 429, 5xx and dropped connections after 0.5, 1, 2, 4, 8, 8 ... seconds, or as Retry-After
specifies.
"""

import asyncio
import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mtp.common.command import from_extra
from megatron_mtp.data.samples import Sample, seed_of
from megatron_mtp.decoding.requests import Finish
from megatron_mtp.decoding.sampling import Sampling

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import Completion
    from transformers import PreTrainedTokenizerBase

RETRIES = 8
MAX_ANSWER_S, MAX_CONNECT_S = 3600.0, 10.0
"""Timeouts in seconds for one response, and for connecting."""
KEY = "OPENAI_API_KEY"
MAX_MESSAGE_CHARS = 300
SLACK = 10
"""The number of re-encoded tokens may differ from the server's by one in this many, plus two, because the tokenizer may
tokenize a sampled output differently.
"""
UNSEEN = " \t\r\n\ufffd"
"""Characters at the ends of an output by which a server's incremental decoding may differ."""


class TextServer:
    """A model behind a URL.

    Args:
        args: flags of `sample`.

    Attributes:
        settings: settings that samples depend on, by flag name; the URL is not among them.
        tokenizer: folder of the model's tokenizer.

    Raises:
        ValueError: the URL does not respond, is not a compatible server, or does not serve `--model`.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self.tokenizer: Path = args.tokenizer
        self._model, self._positions = asyncio.run(self._listed())
        self.settings: dict[str, Any] = {"model": self._model}

    def start(self, tokenizer: "PreTrainedTokenizerBase", ends: frozenset[int]) -> int | None:
        """Set the end tokens.

        Return the number of positions of a prompt and its continuation, if the server reports it.
        """
        self._tokenizer, self._ends = tokenizer, ends
        return self._positions

    def continue_all(self, prompts: Iterable[tuple[int, list[int]]], keep: Callable[[Sample], object]) -> None:
        """Continue every numbered prompt, several at a time, and `keep` each result.

        Raises:
            ValueError: the server rejects a prompt, keeps failing, or has another tokenizer.
        """
        try:
            asyncio.run(self._continue_all(prompts, keep))
        except* ValueError as errors:
            raise errors.exceptions[0] from None

    async def _continue_all(self, prompts: Iterable[tuple[int, list[int]]], keep: Callable[[Sample], object]) -> None:
        left = iter(prompts)

        async def work() -> None:
            while (following := next(left, None)) is not None:
                keep(await self._continued(client, *following))

        async with self._client() as client, asyncio.TaskGroup() as group:
            for _ in range(self._args.batch_size):
                group.create_task(work())

    def _client(self) -> "AsyncOpenAI":
        with from_extra("openai", "--server", "openai"):
            from openai import AsyncOpenAI, Timeout
        url = self._args.server.rstrip("/")
        url = url if url.endswith("/v1") else f"{url}/v1"
        timeout = Timeout(MAX_ANSWER_S, connect=MAX_CONNECT_S)
        key = os.environ.get(KEY) or "none"
        return AsyncOpenAI(base_url=url, api_key=key, max_retries=RETRIES, timeout=timeout)

    async def _listed(self) -> tuple[str, int | None]:
        """Return the model's name and maximum positions."""
        async with self._client() as client:
            try:
                page = await client.with_options(max_retries=1).models.list()
                listed = {str(one.id): getattr(one, "max_model_len", None) for one in page.data}
            except Exception as error:
                raise self._sentence(error, "the list of models") from error
        name = self._args.model or next(iter(listed), None)
        if name not in listed:
            raise ValueError(
                f"--server: {self._args.server} serves {', '.join(listed) or 'no model'}"
                f"{f', and --model is {name}; give one of these' if name else '; start it with one'}."
            )
        return name, listed[name]

    async def _continued(self, client: "AsyncOpenAI", number: int, prompt: list[int]) -> Sample:
        args, sampling = self._args, Sampling.of(self._args)
        room = args.max_new_tokens if self._positions is None else self._positions - len(prompt)
        body: dict[str, Any] = {"stop_token_ids": sorted(self._ends), "return_token_ids": True}
        body |= {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        body |= {"logprobs": 0} if args.logprobs else {}
        try:
            answer = await client.completions.create(
                model=self._model,
                prompt=prompt,
                max_tokens=min(args.max_new_tokens, room),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=seed_of(args.seed, number),
                extra_body=body,
            )
            return self._sample(number, prompt, answer)
        except Exception as error:
            raise self._sentence(error, f"text {number}") from error

    def _sample(self, number: int, prompt: list[int], answer: "Completion") -> Sample:
        """Convert a response to a sample. Raise ValueError for tokens that are not the tokenizer's."""
        choice: Any = answer.choices[0]
        if choice.finish_reason not in (Finish.STOP, Finish.LENGTH):
            raise ValueError(
                f"--server: text {number} ended by '{choice.finish_reason}'; see the server's log. The same command "
                "continues."
            )
        said = getattr(choice, "token_ids", None)
        tokens = self._encoded(choice, answer) if said is None else self._checked(said, choice.text)
        logprobs = choice.logprobs and choice.logprobs.token_logprobs
        fits = logprobs is not None and len(logprobs) == len(tokens) and None not in logprobs
        return Sample(number, prompt, tokens, choice.finish_reason, logprobs if fits else None)

    def _checked(self, tokens: list[int], text: str) -> list[int]:
        """Return the server's token ids, if they match its text."""
        ends = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        decoded = self._tokenizer.decode(tokens[:ends], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if decoded.strip(UNSEEN) != text.strip(UNSEEN):
            raise self._other_tokenizer(
                f"gives the token ids {tokens[:6]} for {text[:40]!r}, and here they are {decoded[:40]!r}"
            )
        return tokens

    def _encoded(self, choice: Any, answer: "Completion") -> list[int]:
        """Tokenize a text for which the server returns no ids, and add the id that ended it."""
        tokens: list[int] = self._tokenizer(choice.text.rstrip("\ufffd"), add_special_tokens=False).input_ids
        counted = answer.usage.completion_tokens if answer.usage else len(tokens)
        if abs(len(tokens) - counted) > 2 + counted // SLACK:
            raise self._other_tokenizer(
                f"counts {counted} tokens in {choice.text[:40]!r}, and here they are {len(tokens)}"
            )
        if choice.finish_reason == Finish.STOP:
            named = [getattr(choice, name, None) for name in ("stop_reason", "matched_stop")]  # in vLLM; in SGLang
            found = next((one for one in named if type(one) is int), self._tokenizer.eos_token_id)
            tokens.append(found)
        return tokens

    def _other_tokenizer(self, what: str) -> ValueError:
        return ValueError(
            f"--server: {self._args.server} {what}; serve the model of --tokenizer, or give the tokenizer of the model "
            "that is served."
        )

    def _sentence(self, error: Exception, what: str) -> Exception:
        """Return the error as a sentence, if it comes from the server and is not a bug."""
        from openai import APIConnectionError, APIStatusError

        url, go_on = self._args.server, "finished samples are kept, and the same command continues."
        if isinstance(error, APIStatusError):
            status, message = error.status_code, " ".join(error.message.split())[:MAX_MESSAGE_CHARS]
            is_tried = status in (408, 409, 429) or status >= 500
            tried = f"{RETRIES + 1} times" if is_tried else "and is not asked again"
            advice = f"set {KEY} to its key" if status in (401, 403) else "see its log, or correct what it names"
            return ValueError(f"--server: {url} answers {status} for {what} {tried} ({message}); {advice}; {go_on}")
        if isinstance(error, APIConnectionError):
            reason = " ".join(str(error.__cause__ or error).split())[:MAX_MESSAGE_CHARS]
            return ValueError(f"--server: no answer from {url} for {what} ({reason}); check that it runs; {go_on}")
        if isinstance(error, AttributeError | TypeError | IndexError):
            return ValueError(f"--server: {url} sends {what} in a format other than OpenAI's; correct the URL.")
        return error
