"""Bodies of requests: OpenAI's fields, and those that vLLM adds under vLLM's names. Any other field is refused.

Out comes what the engine understands: sampling, penalties, seeds, stop tokens, a way to draft.
"""

import secrets
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import Penalties
from megatron_mtp.decoding.sampling import LEAST_TEMPERATURE, Sampling
from megatron_mtp.server.errors import refused

IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls"
    .split()
)  # fmt: skip
"""Fields that change no text, and may be sent."""

ASKING_FOR_NOTHING: tuple[Any, ...] = (None, {}, [], "", False)
HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
}
"""Fields that are not served, with the values that ask for nothing."""

MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_LOGPROBS = 128, 16, 256, 20
SEEDS = 2**63
USUAL_LIMIT = 16
"""New tokens of a completion, where a body does not say."""

Finite = Field(allow_inf_nan=False)


class StreamOptions(BaseModel):
    """`include_usage`: the last event has the sums of tokens."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Body(BaseModel):
    """What both endpoints have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2), Finite] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), Finite] = 1.0
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda given: max(given, 0))] = 0
    min_p: Annotated[float, Field(ge=0, le=1), Finite] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2), Finite] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), Finite] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100), Finite] = 1.0
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_drafts: bool = False
    speculative_config: dict[str, Any] | None = None

    @property
    @abstractmethod
    def top(self) -> int | None:
        """How many of the most probable tokens go with each token; None for no log-probabilities."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """New tokens, at most; None for as many as there are positions."""

    @property
    @abstractmethod
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, given: Any) -> Any:
        """Clients send fields that they do not use as null, or empty."""
        if not isinstance(given, dict):
            return given
        own = cls.model_fields
        return {name: value for name, value in given.items() if not _asks_for_nothing(name, value, name in own)}

    @field_validator("temperature")
    @classmethod
    def _can_be_divided_by(cls, given: float) -> float:
        if 0 < given < LEAST_TEMPERATURE:
            raise ValueError(f"give 0 (greedy) or at least {LEAST_TEMPERATURE}")
        return given

    @field_validator("stop")
    @classmethod
    def _can_be_looked_for(cls, given: str | list[str] | None) -> str | list[str] | None:
        stops = [given] if isinstance(given, str) else given or []
        if len(stops) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
            raise ValueError(f"give at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} letters")
        return given

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the sums of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling.of(self)

    def penalties(self) -> Penalties:
        """On tokens that a text has."""
        return Penalties(self.presence_penalty, self.frequency_penalty, self.repetition_penalty)

    def seeds(self, count: int) -> list[int]:
        """Of so many texts: the given one and the numbers after it, or random ones. Raises APIError."""
        if self.seed is None:
            return [secrets.randbelow(SEEDS) for _ in range(count)]
        if self.seed + count > SEEDS:
            raise refused(f"seed is {self.seed}, which 64 bits do not hold for {count} texts; give less.", "seed")
        return list(range(self.seed, self.seed + count))

    def speculative(self) -> SpeculativeConfig | None:
        """How to draft, if the request says so. Raises APIError."""
        if self.speculative_config is None:
            return None
        try:
            config = config_from(self.speculative_config)
        except (ValueError, TypeError) as error:
            raise refused(str(error), "speculative_config") from error
        if config.method == "draft_model":
            raise refused("a request names no draft model; the server is started with one.", "speculative_config")
        return config


class CompletionBody(Body):
    """/v1/completions; a prompt is a text or token ids, or a list of these."""

    prompt: Any
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool = False

    @property
    def top(self) -> int | None:
        """As in `Body`."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """As in `Body`."""
        return USUAL_LIMIT if self.max_tokens is None else self.max_tokens

    @property
    def echoes(self) -> bool:
        """As in `Body`."""
        return self.echo


class Part(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat; what else it has is for the template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, Any]:
        """As templates read it: the content is one text."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content or ""
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ChatBody(Body):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def top(self) -> int | None:
        """As in `Body`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """As in `Body`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def echoes(self) -> bool:
        """As in `Body`."""
        return False


def _asks_for_nothing(name: str, value: Any, served: bool) -> bool:
    if served or name in IGNORED:
        return value is None or name in IGNORED
    return value in ASKING_FOR_NOTHING or value in HARMLESS.get(name, ())
