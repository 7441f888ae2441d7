"""The table of losses by the names that `--mtp-loss` takes.

This file does not import torch, so that `--help` names the losses at once.
"""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from megatron_mtp.spec.config import MTPConfig, flag_of
from megatron_mtp.spec.registry import Imported, Registry

if TYPE_CHECKING:
    from megatron_mtp.losses.token_loss import TokenLoss

LOSSES: "Registry[type[TokenLoss]]" = Registry(
    "megatron_mtp.losses",
    Imported(
        {
            "ce": "megatron_mtp.losses.token_loss:CrossEntropy",
            "kd": "megatron_mtp.losses.distillation:Divergence",
            "tv": "megatron_mtp.losses.distillation:TotalVariation",
            "nla": "megatron_mtp.losses.distillation:NegativeLogOverlap",
            "lk": "megatron_mtp.losses.distillation:AdaptiveDivergence",
            "e2e_tv": "megatron_mtp.losses.distillation:AcceptedLength",
            "dpace": "megatron_mtp.losses.paced:PacedCrossEntropy",
            "mix": "megatron_mtp.losses.mix:Mix",
        }
    ),
)


READ_BY_LOSSES = ("mtp_temperature", "mtp_lk_eta", "mtp_label_smoothing", "mtp_z_loss")
"""Settings that only some losses read."""


def depth_loss(settings: MTPConfig) -> "TokenLoss":
    """Create the loss named by `settings.mtp_loss`.

    Raises:
        ValueError: there is no such loss, several are named (`MTPConfig.phases`), or a setting has a value that the
            loss does not allow.
    """
    phase, *others = settings.phases()
    if others:
        raise ValueError(
            f"--mtp-loss is '{settings.mtp_loss}', but only megatron-mtp train knows the step that chooses among "
            "losses; give one of them."
        )
    if phase.mtp_loss not in LOSSES:
        raise ValueError(f"--mtp-loss is '{phase.mtp_loss}'; choose one of {', '.join(LOSSES)}.")
    return LOSSES[phase.mtp_loss].of(settings)


def check_loss(*phases: MTPConfig) -> None:
    """Check the names of losses and their settings.

    Args:
        phases: settings of the MTP layers or drafter, one per phase of `MTPConfig.phases` if there are several losses
            in sequence.

    Raises:
        ValueError: as in `depth_loss`, or a setting was given that none of the losses reads.
    """
    losses, settings = [depth_loss(phase) for phase in phases], phases[0]
    for phase, loss in zip(phases, losses, strict=True):
        if settings.kind is not None and settings.kind.has_confidence and not loss.knows_overlap:
            raise ValueError(
                f"--mtp-loss is {phase.mtp_loss}, from which the confidence of --drafter {settings.drafter} cannot "
                "learn how many drafts are accepted; give tv, nla, lk or a mix with one of them."
            )
    for field in fields(settings):
        if field.name in READ_BY_LOSSES and getattr(settings, field.name) != field.default:
            by_default: dict[str, Any] = {field.name: field.default}
            if [depth_loss(replace(phase, **by_default)) for phase in phases] == losses:
                raise ValueError(
                    f"{flag_of(field.name)} is {getattr(settings, field.name)}, which --mtp-loss "
                    f"{' and '.join(phase.mtp_loss for phase in phases)} does not read; drop the flag, or choose a "
                    "loss that does."
                )


def listing() -> str:
    """Format the list of losses, including those of other packages, for `train --list-losses`."""
    return "\n".join(f"  {name:<8}{loss.line}" for name, loss in LOSSES.items())
