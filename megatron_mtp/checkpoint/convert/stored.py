"""Rules against a Megatron checkpoint: which tensors it stores under which keys, and the layout of its export."""

from collections.abc import Iterable
from dataclasses import replace

from megatron_mtp.checkpoint.convert.plan import HFModel, and_more
from megatron_mtp.checkpoint.families import CARRIED, Layout
from megatron_mtp.checkpoint.families.rules import Piece, Rule
from megatron_mtp.checkpoint.families.trunk import (
    ORIGINAL,
    ORIGINAL_NORMS,
    ORIGINAL_WEIGHTS,
    ZERO_QKV_BIAS,
    ZERO_ROUTER_BIAS,
)
from megatron_mtp.checkpoint.hf import by
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY, DRAFTER
from megatron_mtp.megatron.checkpoint.reader import DistReader, StoredDepths


def check_mcore(rules: list[Rule], reader: DistReader) -> None:
    """Check that every tensor of a checkpoint has one rule, and the shape that the config implies.

    A draft vocabulary is ignored, because the MTP layers of a folder draft all tokens, and so is a drafter, which has
    its own folder (`drafter-to-hf`).

    Raises:
        ValueError: a tensor is missing, unexpected, of another shape, or of a dtype that no weight has.
    """
    left = {key for key in reader.keys if key != DRAFT_VOCABULARY and not key.startswith(DRAFTER)}
    for piece in (piece for rule in rules for piece in rule.mcore):
        key = stored_key(piece, reader)
        left -= {piece.key, *piece.aliases}
        dtype, shape, wanted = reader.dtype(key), reader.shape(key), piece.whole or piece.shape
        if not dtype.is_floating_point and not key.startswith(CARRIED):
            raise ValueError(
                f"'{key}' in {reader.folder} is of type {str(dtype).removeprefix('torch.')}, but weights are "
                "floating-point numbers; the checkpoint is damaged."
            )
        if wanted is not None and not piece.fits(shape):
            wrong = f"is {by(shape)}, but the config makes it {by(wanted)}"
            raise ValueError(f"'{key}' in {reader.folder} {wrong}; one of the two is wrong.")
    if left:
        raise ValueError(
            f"'{min(left)}'{and_more(left)} in {reader.folder} has no place in this family, and nothing is dropped "
            "silently; export to another family (--family)."
        )


def stored_key(piece: Piece, reader: DistReader) -> str:
    """Return the key under which a checkpoint stores a piece, its own or an alias.

    Raise ValueError if there is none.
    """
    for key in (piece.key, *piece.aliases):
        if reader.holds(key):
            return key
    raise ValueError(f"{reader.folder} lacks '{piece.key}', which the model's config calls for.")


def stored_layout(reader: DistReader, features: Iterable[str] = (), carried: Iterable[str] = ()) -> Layout:
    """Return the layout of a checkpoint's export: its stored MTP layers, and the forms of the folder."""
    return Layout(StoredDepths.of(reader.keys).layers, frozenset(features) - lost_features(reader), tuple(carried))


def lost_features(reader: DistReader) -> frozenset[str]:
    """Return forms that training removes from a converted checkpoint, because Megatron saves no originals."""
    kept = any(key.startswith(ORIGINAL) for key in reader.keys)
    return frozenset() if kept else frozenset({ORIGINAL_NORMS, ORIGINAL_WEIGHTS})


def zero_features(reader: DistReader) -> tuple[str, ...]:
    """Return forms with biases that the model does not have and some engines expect; they are written as zeros."""
    names = {ZERO_QKV_BIAS: "self_attention.linear_qkv.bias", ZERO_ROUTER_BIAS: "mlp.router.expert_bias"}
    return tuple(feature for feature, name in names.items() if not any(key.endswith(f".{name}") for key in reader.keys))


def beside(model: HFModel, reader: DistReader) -> HFModel:
    """Return a folder's model with rules for this checkpoint, which may lack zero biases and carried tensors."""
    features = (model.layout.features | set(zero_features(reader))) - lost_features(reader)
    layout = replace(model.layout, features=features)
    if model.family.untrainable is None:  # from a Megatron run, which does not save what surrounds a text model
        held = tuple(name for name in layout.carried if reader.holds(f"{CARRIED}{name}"))
        layout = replace(layout, carried=held)
    return replace(model, layout=layout, rules=model.family.all_rules(model.config, layout))
