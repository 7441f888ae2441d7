"""Config keys and arguments that change the computation, and differ between both sides.

Two configs of one `model_type` are compared with the defaults of transformers' class: a key that one side writes out
and the other leaves to its default is equal. Everything else is compared as Megatron's configuration. Only sides whose
settings may differ need Megatron and transformers, so both are imported where they are used.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.audit.finding import NOTE, Finding
from megatron_mtp.checkpoint.audit.side import DEPTH_KEYS, HFSide, MegatronSide, Side
from megatron_mtp.checkpoint.families import Layout
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES

TIE = ("tie_word_embeddings", "untie_embeddings_and_output_weights", "share_embeddings_and_output_weights")
Settings = dict[str, Any]


class IncomparableError(ValueError):
    """Settings that have no common form; the message is the reason."""


def settings(a: Side, b: Side, same_head: bool) -> list[Finding]:
    """A finding for every setting that differs.

    Args:
        a, b: the sides.
        same_head: whether both sides compute with the same head; then it does not matter which of them ties it.
    """
    try:
        ours, theirs = _both(a, b)
    except (ValueError, AttributeError) as error:  # Megatron refuses the settings of one, or lacks them
        return [Finding("not compared", f"Settings were not compared: {str(error).rstrip('.')}.", severity=NOTE)]
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [_finding(name, ours.get(name), theirs.get(name), same_head) for name in names]


def _finding(name: str, ours: Any, theirs: Any, same_head: bool) -> Finding:
    if name in TIE and same_head:
        says = f"One side ties head and embedding ({name}), the other stores an equal head: both compute the same."
        return Finding("copy left out", says, severity=NOTE, names=(name,))
    says = f"'{name}' is {ours!r:.80} on side A, and {theirs!r:.80} on side B."
    counts = name.split(".")[-1] in DEPTH_KEYS
    advice = "put the number of depths there that the files hold" if counts else "take the value of the training"
    return Finding("config", says, advice, names=(name,))


def _both(a: Side, b: Side) -> tuple[Settings, Settings]:
    if isinstance(a, HFSide) and isinstance(b, HFSide):
        return _folders(a, b)
    if isinstance(a, MegatronSide) and isinstance(b, MegatronSide):
        return _checkpoints(a, b)
    if isinstance(a, HFSide) and isinstance(b, MegatronSide):
        return _across(a, b)
    assert isinstance(a, MegatronSide)
    assert isinstance(b, HFSide)
    theirs, ours = _across(b, a)
    return ours, theirs


def _folders(a: HFSide, b: HFSide) -> tuple[Settings, Settings]:
    if not (a.keys and b.keys):
        raise IncomparableError("a config cannot be read")
    if a.keys == b.keys:
        return {}, {}
    if a.config is not None and b.config is not None and a.config.model_type != b.config.model_type:
        one, other = _megatron(a), _megatron(b)
        if one is not None and other is not None:
            return one, other
    return _whole(a.path), _whole(b.path)


def _whole(folder: Path) -> Settings:
    from megatron_mtp.checkpoint.verify.reference_forms import whole_config

    return {name: value for name, value in whole_config(folder).items() if not name.endswith("transformers_version")}


def _megatron(side: HFSide) -> Settings | None:
    """The configuration of Megatron for a folder; None if Megatron cannot run it."""
    from megatron_mtp.checkpoint.convert.computation import settings_of
    from megatron_mtp.checkpoint.families.flags import UntrainableError
    from megatron_mtp.model.arguments import parsed

    if side.family is None or side.config is None or side.family.flags is None:
        return None
    try:
        flags = side.family.flags(side.config, side.layout(side.held_depths) or Layout(0))
    except UntrainableError:
        return None
    return settings_of(parsed(flags, side.config.integer("vocab_size")))


def _checkpoints(a: MegatronSide, b: MegatronSide) -> tuple[Settings, Settings]:
    from megatron_mtp.checkpoint.convert.computation import settings_by_pattern, settings_of
    from megatron_mtp.checkpoint.convert.hybrid import hybrid_arguments

    ours, theirs = _arguments(a), _arguments(b)
    if (a.pattern is None) == (b.pattern is None):
        return settings_of(ours), settings_of(theirs)
    one, other = (
        settings_by_pattern(args if side.pattern is not None else hybrid_arguments(args, str(side.path)))
        for side, args in ((a, ours), (b, theirs))
    )
    return one, other


def _arguments(side: MegatronSide) -> Namespace:
    """The arguments of a checkpoint that Megatron can run."""
    if side.args is None:
        raise IncomparableError("a checkpoint stores no arguments")
    if side.args_from != "the checkpoint":
        raise IncomparableError(f"the arguments of {side.path} are in {side.args_from}, in another form")
    if not side.runs:
        raise IncomparableError(f"Megatron cannot run the model of {side.path}")
    return side.args


def _across(folder: HFSide, saved: MegatronSide) -> tuple[Settings, Settings]:
    from megatron_mtp.checkpoint.convert.computation import settings_of

    described = _megatron(folder)
    if described is not None:
        return described, settings_of(_arguments(saved))
    kept = saved.path / HF_FILES
    if (kept / CONFIG).is_file():
        return _whole(folder.path), _whole(kept)
    raise IncomparableError("Megatron has no configuration for the folder's model")
