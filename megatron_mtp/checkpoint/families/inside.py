"""DSpark drafters inside a model's folder, with names that MTP layers have in other folders.

    mtp.0.enorm.weight, mtp.0.e_proj.weight             an MTP layer (DeepSeek-V4)
    mtp.0.main_proj.weight, mtp.2.markov_head.*         the first and the last stage of a DSpark drafter
    mtp_dspark.*                                        one as well (Mistral Large 4)

A drafter has stages, not MTP layers: it drafts a block of tokens in one pass, from states of several trunk layers. No
count of MTP layers includes it. Config keys and tensors both indicate it; one without the other is a fault.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

INNER_KEYS = ("dspark_block_size", "dspark_target_layer_ids", "dspark_noise_token_id", "dspark_markov_rank")
"""Config keys of such a drafter that engines read."""
STAGES = ("n_mtp_layers", "num_nextn_predict_layers")
"""Config keys that count its stages; the second one also counts MTP layers."""
TITLE, METHOD = "DSpark", "dspark"
"""Name of this kind of drafter in messages, and its method in engines; `mtp` loads only some of these tensors."""
_TELLING = re.compile(r"^(mtp\.\d+|mtp_dspark)\..*\b(main_proj|markov_head|confidence_head)\b")
_STAGE = re.compile(r"^(?:mtp|mtp_dspark(?:\.layers)?)\.(\d+)\.")
_BEGINNINGS = ("mtp.", "mtp_dspark.")
_FIRST, _LAST = ("main_proj", "main_norm"), ("norm", "markov_head", "confidence_head")
"""Modules of the first stage, which joins the trunk's states, and of the last one, which drafts."""
HEADS_OF_STAGES = re.compile(rf"^mtp\.\d+\.({'|'.join((*_FIRST, *_LAST))}|hc_head)(\b|_)")
"""Tensors of the first and the last stage that the others lack."""


@dataclass(frozen=True)
class InnerDrafter:
    """A drafter inside a model.

    Attributes:
        names: its tensors; empty if only the config has it.
        stages: numbers of its stages among the tensors.
        counted: number of stages in the config; None if no key has one.
        block: number of tokens of a block; None if the config does not specify it.
        keys: its keys in the config.
    """

    names: frozenset[str]
    stages: tuple[int, ...]
    counted: int | None
    block: int | None
    keys: tuple[str, ...]

    @classmethod
    def of(cls, keys: Mapping[str, Any], names: Iterable[str]) -> "InnerDrafter | None":
        """Return the drafter that a config's keys or tensor names indicate; None if there is none."""
        own = tuple(name for name in INNER_KEYS if keys.get(name) is not None)
        names = [name for name in names if name.startswith(_BEGINNINGS)]
        shown = any(_TELLING.match(name) or name.startswith(_BEGINNINGS[1]) for name in names)
        if not own and not shown:
            return None
        held = frozenset(names) if shown else frozenset[str]()
        stages = sorted({int(match.group(1)) for name in held if (match := _STAGE.match(name))})
        counts = (value for name in STAGES if isinstance(value := keys.get(name), int) and not isinstance(value, bool))
        block = keys.get(INNER_KEYS[0])
        return cls(held, tuple(stages), next(counts, None), block if isinstance(block, int) else None, own)

    @property
    def says(self) -> str:
        """A description in words."""
        stages = f" of {len(self.stages)} stage{'' if len(self.stages) == 1 else 's'}" if self.stages else ""
        block = f", block {self.block}" if self.block else ""
        where = next((prefix for prefix in _BEGINNINGS[::-1] if any(n.startswith(prefix) for n in self.names)), "")
        return f"a {TITLE} drafter{stages}{block}{f', in {where}*' if where else ''}"

    def lost(self) -> Iterator[str]:
        """What the tensors lack, each as part of a sentence: stages, and modules of the first and the last one."""
        if not self.names:
            return
        most = max(self.counted or 0, max(self.stages, default=-1) + 1)
        yield from (f"stage {number}" for number in range(most) if number not in self.stages and self.stages)
        if self.stages and all(name.startswith(_BEGINNINGS[0]) for name in self.names):
            for stage, modules in ((0, _FIRST), (most - 1, _LAST)):
                if stage in self.stages:
                    held = {name.removeprefix(f"mtp.{stage}.").split(".")[0] for name in self.names}
                    yield from (f"'mtp.{stage}.{module}'" for module in modules if module not in held)

    def lost_keys(self) -> list[str]:
        """Missing keys without which engines do not load the tensors."""
        return [name for name in INNER_KEYS if name not in self.keys] if self.names else []


def stage_of(name: str) -> int | None:
    """Return the stage of a drafter's tensor; None for one outside the stages."""
    match = _STAGE.match(name)
    return None if match is None else int(match.group(1))


def check_no_drafter(names: Iterable[str], what: object, advice: str) -> None:
    """Raise ValueError, for a command on MTP layers, if one of these tensors belongs to a drafter inside the model."""
    found = InnerDrafter.of({}, names)
    if found is not None:
        raise ValueError(f"{what} has {found.says}, not MTP layers; {advice}.")
