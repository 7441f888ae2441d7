"""Drafting methods and verifiers by name, with their settings in the form of vLLM's `--speculative-config`.

Plain data, without torch.

Some keys apply to every method; the others belong to the chosen method and verifier. Each method and verifier has a
frozen dataclass whose fields define type, default, range and meaning of its keys:

    @dataclass(frozen=True)
    class EchoSettings(Settings):
        tokens: int = setting(1, "how many of the newest tokens are repeated", 1, 8)

Values are checked on creation. Help, tables in the documentation and error messages use the same fields. `method.py`
reads them from JSON. vLLM's names are converted first where they differ:

    {"method": "deepseek_mtp", "num_speculative_tokens": 1, "disable_padded_drafter_batch": false}
    {"method": "mtp", "num_speculative_tokens": 1}
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf
from types import UnionType
from typing import Any, get_args, get_origin

from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.spec.registry import Imported, Registry

MOST_DRAFTED = 15
"""Maximum K: a chain has at most 16 rows, which fused decode kernels support."""

_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple[int, ...]: "a list of whole numbers",
    type(None): "null",
}


@dataclass(frozen=True)
class Settings:
    """Base class of settings; also the settings of a method or verifier that has none.

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """

    def __post_init__(self) -> None:
        for one in keys(type(self)):
            one.check(getattr(self, one.name))


def setting[T](default: T, meaning: str, *range: float) -> T:
    """Define a field of a `Settings` class; `range` is the smallest and the largest value, if limited."""
    made: Any = field(default=default, metadata={"meaning": meaning, "range": range or None})
    return made


@dataclass(frozen=True)
class Key:
    """A key of the speculative config.

    Attributes:
        kinds: allowed types.
        range: smallest and largest value; None if unlimited.
    """

    name: str
    kinds: tuple[Any, ...]
    default: Any
    meaning: str
    range: tuple[float, float] | None = None

    def check(self, value: object) -> None:
        """Raise ValueError for a value that is not allowed."""
        # JSON has no tuples and may write 1.0 as 1, and in Python a bool is an int.
        found: Any = tuple[int, ...] if isinstance(value, tuple) and {int} >= {*map(type, value)} else type(value)
        if found not in self.kinds and not (found is int and float in self.kinds):
            words = " or ".join(_KINDS[kind] for kind in self.kinds)
            raise ValueError(f"speculative config: {self.name} is {value!r}; give {words}.")
        if self.range is not None and isinstance(value, int | float) and not self.range[0] <= value <= self.range[1]:
            low, high = self.range
            raise ValueError(f"speculative config: {self.name} is {value!r}; give a number from {low} to {high}.")

    @property
    def limits(self) -> str:
        """Format the default as JSON and the range in brackets, if there are any."""
        parts = (
            [] if self.default is None else [str([*self.default] if isinstance(self.default, tuple) else self.default)]
        )
        if self.range is not None:
            low, high = self.range
            parts.append(f"{low} or more" if high == inf else f"{low} to {high}")
        return f" ({'; '.join(filter(None, parts))})" if any(parts) else ""


def keys(kind: type[Settings]) -> list[Key]:
    """Return the keys of a settings class, in order."""
    return [
        Key(
            one.name,
            get_args(one.type) if get_origin(one.type) is UnionType else (one.type,),
            one.default,
            one.metadata["meaning"],
            one.metadata["range"],
        )
        for one in fields(kind)
    ]


NO_SETTINGS = Settings()


@dataclass(frozen=True)
class SpeculativeConfig:
    """A drafting method with its verifier.

    Attributes:
        method: a name in PROPOSERS.
        num_speculative_tokens: K, the depth of a draft; 'auto' chooses it for each step; None for the method's default.
        verifier: a name in VERIFIERS; None for greedy at temperature 0 and otherwise the lossless rule for the draft.
        use_draft_probs: verify sampled drafts with the distribution q that they were sampled from; otherwise as if they
            were deterministic.
        settings: settings of the method; `NO_SETTINGS` for its defaults.
        verifier_settings: settings of the verifier, likewise.

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
        count, said = self.num_speculative_tokens, "speculative config: num_speculative_tokens is"
        if count not in (None, "auto"):
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"{said} {count!r}; give a number from 0 to {MOST_DRAFTED}, or 'auto'.")
            if count > MOST_DRAFTED:
                raise ValueError(f"{said} {count}, above the limit of {MOST_DRAFTED}; give fewer.")
        Key("use_draft_probs", (bool,), True, "").check(self.use_draft_probs)

    def flat(self) -> dict[str, Any]:
        """Return keys and values as in JSON."""
        return {key: getattr(self, key) for key in COMMON_KEYS} | asdict(self.settings) | asdict(self.verifier_settings)


COMMON_KEYS = [field.name for field in fields(SpeculativeConfig) if field.type is not Settings]
"""Keys of every method."""

PROPOSERS: Registry[Any] = Registry(
    "megatron_mtp.proposers",
    Imported(
        {
            "mtp": "megatron_mtp.decoding.proposers.mtp:Vanilla",
            "mtp_eagle": "megatron_mtp.decoding.proposers.mtp:ReusedLayer",
            "mtp_tree": "megatron_mtp.decoding.proposers.tree:Tree",
            "mtp_beam": "megatron_mtp.decoding.proposers.tree:Beam",
            **{name: part for row in DRAFTERS.values() for name, part in row.methods.items()},
            "parallel_heads": "megatron_mtp.decoding.proposers.mtp:ParallelHeads",
            "draft_model": "megatron_mtp.decoding.proposers.draft_model:DraftModel",
            "draft_model_tree": "megatron_mtp.decoding.proposers.draft_model:DraftModelTree",
            "ngram": "megatron_mtp.decoding.proposers.ngram:Ngram",
            "lookahead": "megatron_mtp.decoding.proposers.ngram:Lookahead",
            "exhaustive": "megatron_mtp.decoding.proposers.exhaustive:Exhaustive",
            "plain": "megatron_mtp.decoding.proposers.plain:Plain",
        }
    ),
)
"""Drafting methods, each a class of `Proposer`. Those of drafters have the name of the drafter's kind. A row is an
entry point, imported on look-up, so that listing names does not import torch. Other packages add rows under the group
`megatron_mtp.proposers`.
"""

VERIFIERS: Registry[Any] = Registry(
    "megatron_mtp.verifiers",
    Imported(
        {
            "greedy": "megatron_mtp.decoding.verifiers:greedy",
            "rejection": "megatron_mtp.decoding.verifiers:rejection",
            "block": "megatron_mtp.decoding.verifiers:block",
            "spectr": "megatron_mtp.decoding.verifiers:spectr",
            "specinfer": "megatron_mtp.decoding.verifiers:specinfer",
            "relaxed": "megatron_mtp.decoding.verifiers:relaxed",
            "joint": "megatron_mtp.decoding.verifiers:joint",
            "mtjd": "megatron_mtp.decoding.verifiers:mtjd",
            "bild": "megatron_mtp.decoding.verifiers:bild",
        }
    ),
)
"""Acceptance rules, each a `Verifier`, in the same form."""


# --- vLLM's names: vllm/config/speculative.py of 0.33 ----------------------------------------------------------------

_FAMILIES = (
    "bailing_hybrid bailing_hybrid_v3 deepseek dots3_note ernie exaone4_5 exaone_moe gemma4 glm4_moe glm4_moe_lite "
    "glm5_next glm_ocr hy_v3 hy_v4 inkling kimi_k3 longcat_flash mimo mimo_v2 minimax_m3 nemotron_h pangu_ultra_moe "
    "qwen3_5 qwen3_next qwen4_exp step3p5"
).split()
FOREIGN_METHODS = {f"{family}_mtp": "mtp" for family in _FAMILIES} | {"ngram_gpu": "ngram"}
"""vLLM's names for the MTP modules of each family; all of them mean `mtp`."""

_ANY = (False, True)


@dataclass(frozen=True)
class Foreign:
    """A key of vLLM's config.

    Attributes:
        meaning: its meaning here.
        values: accepted values; None for any, passed on to `name`.
        name: the key of this package that it sets; None if it has no effect.
        becomes: values of `name` that differ from vLLM's.
    """

    meaning: str
    values: tuple[Any, ...] | None
    name: str | None = None
    becomes: Mapping[Any, Any] | None = field(default=None, hash=False)


_RULES: dict[str, str | None] = {"standard": None, "block": "block"}
_IGNORED = "ignored: "
FOREIGN_KEYS = {
    "rejection_sample_method": Foreign(
        "sets `verifier`: `standard` to the default, `block` to `block`", (*_RULES,), "verifier", _RULES
    ),
    "prompt_lookup_min": Foreign("sets `ngram_min`", None, "ngram_min"),
    "prompt_lookup_max": Foreign("sets `ngram_max`", None, "ngram_max"),
    "draft_sample_method": Foreign(
        _IGNORED + "drafts are greedy at temperature 0, and sampled and verified with their probabilities above",
        ("greedy", "probabilistic"),
    ),
    "disable_padded_drafter_batch": Foreign(_IGNORED + "drafts have no padding", _ANY),
    "disable_eagle_block_drop": Foreign(_IGNORED + "cached blocks keep the states of drafts", _ANY),
    "use_local_argmax_reduction": Foreign(_IGNORED + "it does not change tokens", _ANY),
    "draft_tensor_parallel_size": Foreign(_IGNORED + "MTP layers are split like the trunk", (1,)),
    "enforce_eager": Foreign(_IGNORED + "CUDA graphs are used where possible", (False,)),
    "parallel_drafting": Foreign(_IGNORED + "`peagle` and block drafters (`dflash`, ...) draft in parallel", (False,)),
    "use_heterogeneous_vocab": Foreign(_IGNORED + "draft models must have the trunk's vocabulary", (False,)),
    "enable_adaptive_verification": Foreign(_IGNORED + "use `min_confidence` of `dspark`", (False,)),
    "index_share_for_mtp_iteration": Foreign(_IGNORED + "there are no index layers", (False,)),
    "moe_backend": Foreign(_IGNORED + "the modules are those of training", ("auto",)),
    "kv_cache_dtype": Foreign(_IGNORED + "the cache has the data type of the weights", ("auto",)),
    **{
        name: Foreign(_IGNORED + "not applicable", ())
        for name in (
            *("attention_backend", "quantization", "max_model_len", "revision", "code_revision", "draft_load_config"),
            *("num_speculative_tokens_per_batch_size", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
            "dspark_draft_topk",
        )
    },
}


def from_vllm(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings from vLLM's names to this package's.

    Raises:
        ValueError: a key has a value with no equivalent here, or sets the same thing as another key.
    """
    made = {key: value for key, value in given.items() if key not in FOREIGN_KEYS}
    if isinstance(method := given.get("method"), str):
        made["method"] = FOREIGN_METHODS.get(method, method)
    for name, value in given.items():
        if name not in FOREIGN_KEYS or value is None:
            continue
        key = FOREIGN_KEYS[name]
        if key.values is not None and not any(value == one and type(value) is type(one) for one in key.values):
            allowed = [*(f"'{one}'" if isinstance(one, str) else str(one).lower() for one in key.values), "null"]
            raise ValueError(
                f"speculative config: {name} is {value!r}, which is vLLM's; give {' or '.join(allowed)}, or leave it "
                "out."
            )
        if key.name is None:
            continue
        if key.name in made:
            raise ValueError(f"speculative config: {name} and {key.name} are the same setting; give one of the two.")
        made[key.name] = value if key.becomes is None else key.becomes[value]
    return made
