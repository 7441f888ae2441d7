"""Draft heads to attach to an existing model, as plain data, and checks of their settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import HEADS, module_of
from megatron_mtp.spec.kinds import kind_of

READ = {
    *(one.name for one in fields(MTPConfig) if one.name.startswith("drafter")),
    *("mtp_loss", "mtp_loss_mix", "mtp_temperature", "mtp_lk_eta", "mtp_label_smoothing", "mtp_z_loss"),
    *("mtp_loss_weights", "mtp_train_only", "mtp_draft_vocab_file"),
}
"""Settings of all attached heads: drafter, loss, temperature, weights, and whether only the head is trained."""

OF_MTP = {"mtp_unroll", "mtp_hidden_state_mixing"}
"""Settings of attached MTP layers only."""

MTP, POLICY = "mtp", "policy"
"""Names of the MTP layers (and their module) and of the parameter group for everything but the heads."""

TAKEN_NAMES = *HEADS, POLICY
"""Names that a drafter cannot have."""


@dataclass(frozen=True)
class Head:
    """A draft head to attach: MTP layers, or a drafter if the settings name one.

    Attributes:
        settings: architecture and training settings. MTP layers use cross-entropy by default, and with `mtp_train_only`
            their loss trains nothing else; a drafter uses the default loss of its kind.
        depths: number D of new MTP layers; None to train the model's own, and for a drafter, which has `drafter_steps`.
        weight: weight of its loss in the sum over all heads.
        name: name of a drafter; '' for its kind. Its module is `drafter_NAME`. MTP layers are named 'mtp'.
    """

    settings: MTPConfig = field(default_factory=MTPConfig)
    depths: int | None = None
    weight: float = 1.0
    name: str = ""

    @property
    def called(self) -> str:
        """Name of the head."""
        return MTP if self.settings.drafter is None else self.name or self.settings.drafter

    @property
    def module(self) -> str:
        """Name of its module in the model."""
        return MTP if self.settings.drafter is None else module_of(self.called)

    def with_usual_loss(self) -> "Head":
        """Return the head with the default loss of its kind if the settings do not choose one."""
        if self.settings.drafter is None or self.settings.mtp_loss != MTPConfig().mtp_loss:
            return self
        own: dict[str, Any] = kind_of(self.settings.drafter).loss
        return replace(self, settings=replace(self.settings, **own))


def heads_of_settings(settings: MTPConfig, depths: int | None, adopts: bool) -> list[Head]:
    """Return the heads that `depths` and `settings` describe: MTP layers, a drafter, or both, with default losses."""
    if settings.drafter is None:
        return [Head(settings, depths)]
    if depths is None and not adopts:
        return [Head(settings)]
    own, drafter = settings.apart()
    return [Head(own, depths), Head(drafter)]


def mtp_among(heads: Sequence[Head]) -> Head | None:
    """Return the MTP layers among the heads, or None."""
    return next((head for head in heads if head.settings.drafter is None), None)


def refusals(heads: Sequence[Head]) -> list[tuple[Any, str]]:
    """Return checks of heads that do not depend on the model: whether each fails, and its error message."""
    unread = [
        one.name
        for one in fields(MTPConfig)
        for head in heads
        if one.name not in (READ | OF_MTP if head.settings.drafter is None else READ)
        and getattr(head.settings, one.name) != one.default
    ]
    names = [head.called for head in heads]
    twice = next((name for name in names if names.count(name) > 1), None)
    strange = next((name for name in names if not name.isidentifier()), None)
    sized = next((head.called for head in heads if head.settings.drafter and head.depths is not None), None)
    weights = [head.weight for head in heads if not 0 <= head.weight < inf]
    return [
        (
            unread,
            f"{', '.join(dict.fromkeys(unread))} in the settings is not supported for these attached heads; leave it "
            "out, or give it to megatron-mtp train.",
        ),
        (
            sum(head.settings.drafter is None for head in heads) > 1,
            "two of the heads are MTP layers, and a model has only one block of them; give one of the two.",
        ),
        (twice is not None, f"two heads are called '{twice}'; give one of them another name, Head(..., name=)."),
        (
            strange is not None,
            f"a head is called '{strange}', which is not a valid module name; give letters, digits and underscores.",
        ),
        (
            any(head.settings.drafter and head.called in TAKEN_NAMES for head in heads),
            f"a drafter cannot be called {' or '.join(TAKEN_NAMES)}; give it another name.",
        ),
        (
            sized is not None,
            f"the head '{sized}' is a drafter, whose number of drafts is drafter_steps in its settings; give that.",
        ),
        (weights, f"the weight of a head is {', '.join(map(str, weights))}; give 0 or more."),
    ]
