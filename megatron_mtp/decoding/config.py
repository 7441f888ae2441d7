"""The settings of a drafting method, in the form of vLLM's `--speculative-config`, as plain data.

Some keys go with every method; the others are those of the method and of the verifier that were chosen. `method.py`
reads them from JSON, and knows the names.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_mtp.decoding.settings import Key, Settings

MOST_DRAFTED = 15
"""K + 1 rows of a chain at most 16: what fused decode kernels take."""

NO_SETTINGS = Settings()


@dataclass(frozen=True)
class SpeculativeConfig:
    """One drafting method with its verifier.

    Attributes:
        method: a name in PROPOSERS.
        num_speculative_tokens: K, the depth of a draft; 'auto' picks it per step; None takes the method's default.
        verifier: a name in VERIFIERS; None is greedy at temperature 0, and above it the lossless rule for the draft.
        use_draft_probs: verify sampled drafts with the q that they came from; without, as if they were deterministic.
        settings: the method's own; `NO_SETTINGS` for its defaults.
        verifier_settings: the verifier's own, likewise.

    Raises:
        ValueError: a value that no method allows.
    """

    method: str
    num_speculative_tokens: int | str | None = None
    verifier: str | None = None
    use_draft_probs: bool = True
    settings: Settings = NO_SETTINGS
    verifier_settings: Settings = NO_SETTINGS

    def __post_init__(self) -> None:
        _check_count(self.num_speculative_tokens)
        Key("use_draft_probs", (bool,), True, "").check(self.use_draft_probs)

    def flat(self) -> dict[str, Any]:
        """All keys with their values, as in JSON."""
        return {key: getattr(self, key) for key in COMMON_KEYS} | asdict(self.settings) | asdict(self.verifier_settings)


COMMON_KEYS = [field.name for field in fields(SpeculativeConfig) if field.type is not Settings]
"""The keys of every method."""


def _check_count(count: int | str | None) -> None:
    if count is None or count == "auto":
        return
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(
            f"speculative config: num_speculative_tokens is {count!r}; give a number from 0 to {MOST_DRAFTED}, or "
            "'auto'."
        )
    if count > MOST_DRAFTED:
        raise ValueError(
            f"speculative config: num_speculative_tokens is {count}, above the limit of {MOST_DRAFTED}; give fewer."
        )
