"""Checks of the checkpoint to load, before a model is built, and the draft vocabulary from checkpoint or flags.

Without these checks, Megatron starts from random weights if there is nothing to load, and exits with status 0 if it
cannot read a checkpoint.
"""

import zipfile
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.training import get_tokenizer
from megatron.training.checkpointing import checkpoint_exists, get_load_checkpoint_path_by_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_mtp.data.checks import FILE, SIZE, most_frequent
from megatron_mtp.megatron.checkpoint.catalogue import FORMAT, read_catalogue
from megatron_mtp.megatron.checkpoint.damage import read_errors
from megatron_mtp.megatron.checkpoint.iterations import named_iteration, repair_tracker
from megatron_mtp.megatron.checkpoint.reader import (
    DistReader,
    absent_layers,
    check_query_norms,
    sharding_type,
    stored_depths,
    stored_draft_vocabulary,
)
from megatron_mtp.megatron.patterns import trunk_and_depths
from megatron_mtp.model.draft_vocabulary import tokens_of_file
from megatron_mtp.spec.config import MTPConfig, flag_of
from megatron_mtp.spec.head import DRAFTER_SETTINGS, HEADS, has_both, only_drafter
from megatron_mtp.spec.rope_scaling import scaling_arguments
from megatron_mtp.training.short_log import say

FLAGS = {"load": "--load", "pretrained_checkpoint": "--pretrained-checkpoint"}
POSITIONS = ("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved")
"""Arguments of rotary positions, without those of a scaling."""
OTHER_FORMATS = ("torch_dcp", "fsdp_dtensor")
"""Formats without `metadata.json`; Megatron reads them by --ckpt-format."""


def check_load(args: Namespace, mends: bool = True) -> None:
    """Check that the checkpoints of --load and --pretrained-checkpoint are complete; `mends` repairs an empty tracker.

    Raises:
        ValueError: a checkpoint is missing or incomplete.
    """
    if mends and args.load is not None and (repaired := repair_tracker(Path(args.load))) is not None and args.rank == 0:
        say(f"> a save to {args.load} was cut short; going on from iteration {repaired}, its newest whole one")
    named = {name: Path(given) for name in FLAGS if (given := getattr(args, name)) is not None and "://" not in given}
    found = next((name for name, folder in named.items() if checkpoint_exists(folder)), None)
    if found is None and args.ckpt_step is not None and "load" in named:
        found = "load"  # then Megatron needs no tracker
    if found is not None:
        _check_checkpoint(args, FLAGS[found], named[found])
    elif "pretrained_checkpoint" in named:
        _refuse(FLAGS["pretrained_checkpoint"], named["pretrained_checkpoint"])
    elif "load" in named and not _starts_anew(args, named["load"]):
        _refuse(FLAGS["load"], named["load"])


def _refuse(flag: str, folder: Path) -> NoReturn:
    try:
        named_iteration(folder)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    raise AssertionError(f"{folder} has a tracker")


def _starts_anew(args: Namespace, folder: Path) -> bool:
    """Return whether the run loads from its own save folder and has not saved yet."""
    if args.non_persistent_ckpt_type is not None:
        return True  # Megatron checks non-persistent checkpoints first
    is_free = folder.is_dir() or not (folder.exists() or folder.is_symlink())
    is_own = args.save is not None and folder.resolve() == Path(args.save).resolve()
    return is_free and is_own and not (args.skip_train or args.exit_on_missing_checkpoint)


def _check_checkpoint(args: Namespace, flag: str, folder: Path) -> None:
    try:
        iteration = named_iteration(folder, args.ckpt_step or None)  # Megatron treats 0 as unset
        if any(iteration.glob("mp_rank_*")):
            files = sorted(iteration.glob("mp_rank_*/model_optim_rng.pt"))
            if not files:
                raise ValueError(f"{iteration} has no file mp_rank_*/model_optim_rng.pt; give another checkpoint.")
            with read_errors(f"{files[0]} cannot be loaded"):  # Megatron reads it before a model is built
                found = torch.load(files[0], map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(files[0]))
            _check_layout(args, found.get("args"), iteration)
        elif args.ckpt_format in OTHER_FORMATS and not (iteration / FORMAT).exists():
            read_catalogue(iteration)
        else:
            DistReader(iteration).state()
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _check_layout(args: Namespace, stored: Namespace | None, iteration: Path) -> None:
    """Check whether a checkpoint with one file per rank was saved by as many ranks of each kind."""
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        own, theirs = getattr(args, name), getattr(stored, name, None)
        if theirs not in (None, own):
            raise ValueError(
                f"{iteration} has Megatron's older format, a file a rank, saved with {flag_of(name)} {theirs}, and "
                f"this run has {own}; give {theirs}, and save with --ckpt-format torch_dist to load it in any layout."
            )


def loaded_iteration(args: Namespace) -> tuple[str, Path] | None:
    """Return the argument (a key of FLAGS) that names the checkpoint to start from, and the folder of its iteration."""
    name = next((name for name in FLAGS if checkpoint_exists(getattr(args, name))), None)
    return None if name is None else (name, Path(get_load_checkpoint_path_by_args(args, name)))


@dataclass(frozen=True)
class LoadPlan:
    """What a run loads from the checkpoint that it starts from.

    Attributes:
        absent: layers that the checkpoint lacks, for the MTP layers or each drafter; a drafter's layers are all number
            0.
        draft_vocabulary: tokens [N] that can be drafted, ascending; None for all.
        new_heads: whether the checkpoint lacks the MTP layers or drafters, so their own output rows are new.
        finetune: whether the run starts as with --finetune, because the optimizer state belongs to other layers.
        messages: lines to print.
    """

    absent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    draft_vocabulary: Tensor | None = None
    new_heads: bool = False
    finetune: bool = False
    messages: tuple[str, ...] = ()

    def then(self, message: str, **changes: Any) -> "LoadPlan":
        """Return a copy with an additional message and other changes."""
        return replace(self, messages=(*self.messages, message), **changes)


def plan_load(args: Namespace, settings: MTPConfig) -> LoadPlan:
    """Plan what a run loads. If the checkpoint lacks its MTP layers or drafter, the run starts at step 0.

    Raises:
        ValueError: the checkpoint has a different trunk, MTP layers or positions than this run, or the draft vocabulary
            flags do not fit the checkpoint, the data, the vocabulary or the layout.
    """
    plan, found = LoadPlan(finetune=args.finetune), loaded_iteration(args)
    if found is not None:
        plan = _of_layers(plan, args, settings, *found)
    return plan if args.mtp_num_layers is None else _of_draft_vocabulary(plan, args, settings, found)


def _of_layers(plan: LoadPlan, args: Namespace, settings: MTPConfig, name: str, folder: Path) -> LoadPlan:
    """Return the plan with layers that the iteration lacks, according to the argument `name`."""
    source = f"{FLAGS[name]} {getattr(args, name)}"
    common: dict[str, Any] = {}
    has_drafter = False
    if (folder / FORMAT).exists():
        reader = DistReader(folder)
        check_query_norms(reader, source)
        common, has_drafter = reader.state(), reader.has_drafter
    stored = common.get("args")
    if stored is not None:
        _check_layers(args, stored, f"{source} holds")
    first, of_drafter = HEADS
    if args.drafter is not None:
        if has_drafter and stored is not None:
            _check_drafter(folder, stored, args)
        else:  # the stored optimizer has no state for it
            plan = plan.then(
                f"a new drafter on the trunk of {folder}; starting as with --finetune",
                absent={of_drafter if has_both(args) else first: (0,)},
                finetune=True,
            )
    if _has_layers(args):
        plan = _of_changed_layers(plan, args, settings, folder, common)
    if has_drafter and stored is not None and (left_out := _left_out(args, stored)):
        said = f"{folder} has {left_out}, which this run leaves out; starting as with --finetune"
        plan = plan.then(said, finetune=True)  # the stored optimizer has state for it
    if stored is not None and not args.use_checkpoint_args:
        plan = check_positions(plan, args, stored, source)
    return plan


def _of_changed_layers(
    plan: LoadPlan, args: Namespace, settings: MTPConfig, folder: Path, common: dict[str, Any]
) -> LoadPlan:
    """Return the plan with the MTP layers that the checkpoint lacks.

    A run may continue with more or fewer layers, keeping the optimizer's state of the others. From a checkpoint without
    any, the optimizer starts from scratch.

    Args:
        plan: so far.
        args, settings: the run's.
        folder: of the iteration.
        common: what it stores in addition to tensors; empty for a format that is not a list of tensors.

    Raises:
        ValueError: the checkpoint has other layers, or the state of its optimizer cannot be taken apart.
    """
    layers = 1 if args.mtp_use_repeated_layer else args.mtp_num_layers
    drops = bool(common) and not args.mtp_use_repeated_layer
    absent = absent_layers(folder, layers, settings.mtp_architecture == "sequential", settings.mtp_init, drops)
    if absent:
        plan = replace(plan, absent={**plan.absent, next(iter(HEADS)): absent})
    stored = stored_depths(folder)
    if stored is None or stored.layers == layers:
        return plan
    if absent and (not stored.layers or not common):
        said = f"MTP layers that {folder} lacks: --mtp-init {settings.mtp_init}; starting as with --finetune"
        return plan.then(said, finetune=True)  # the stored optimizer has no state for new layers
    if not (plan.finetune or args.no_load_optim) and sharding_type(common) not in (None, "fully_reshardable"):
        raise ValueError(
            f"{folder} has {stored.layers} MTP layers and its optimizer's state in buffers of all parameters, which "
            f"cannot go on with {layers}; save it again with --mtp-num-layers {stored.layers} and "
            "--dist-ckpt-optim-fully-reshardable, or start with a new state (--no-load-optim)."
        )
    others = range(min(layers, stored.layers) + 1, max(layers, stored.layers) + 1)
    names = ", ".join(map(str, others))
    does = f"begins by --mtp-init {settings.mtp_init}, its optimizer's moments at zero" if absent else "is left out"
    return plan.then(
        f"{folder} has {stored.layers} MTP layers, this run {layers}: layer {names} {does}; all else goes on"
    )


def _check_drafter(folder: Path, stored: Namespace, args: Namespace) -> None:
    """Check whether the drafter of an iteration, with its stored training arguments, matches the run's.

    Raises:
        ValueError: it is of another kind or size, or reads other layers.
    """
    for name in DRAFTER_SETTINGS:
        own, theirs = getattr(args, name), getattr(stored, name, None)
        if own != theirs:
            raise ValueError(
                f"{flag_of(name)} is {_words(own)}, and the drafter of {folder} (--load) has {_words(theirs)}; give "
                "that, or --use-checkpoint-args."
            )


def _has_layers(args: Namespace) -> bool:
    """Return whether the run has MTP layers, and not only a drafter."""
    return args.mtp_num_layers is not None and only_drafter(args) is None


def _left_out(args: Namespace, stored: Namespace) -> str:
    """Describe parts of a checkpoint with a drafter that the run neither trains nor saves; empty for none."""
    parts = {"MTP layers": has_both(stored) and not _has_layers(args), "a drafter": args.drafter is None}
    return " and ".join(part for part, is_left in parts.items() if is_left)


def _words(value: Any) -> str:
    if value is None:
        return "the default"
    return (" ".join(map(str, value)) or "without numbers") if isinstance(value, list | tuple) else str(value)


def _check_layers(args: Namespace, stored: Namespace, said: str) -> None:
    """Check whether the checkpoint's trunk has the layers of this run, if one of them is a hybrid."""
    own, theirs = (getattr(each, "hybrid_layer_pattern", None) for each in (args, stored))
    if theirs is not None and own is None:
        raise ValueError(f"{said} a hybrid model; give its --hybrid-layer-pattern '{theirs}'.")
    if theirs is None and own is not None:
        _check_gpt_as_hybrid(own, stored, said)
    if theirs is not None and own is not None:
        (trunk, depths), (stored_trunk, stored_depths) = map(trunk_and_depths, (own, theirs))
        in_place = args.drafter is not None and not depths  # the drafter replaces the stored MTP layers
        other = stored_depths and depths[:1] != stored_depths[:1]  # --mtp-init creates missing ones
        if trunk != stored_trunk or (other and not in_place):
            raise ValueError(
                f"{said} a hybrid model of layers {theirs}, and --hybrid-layer-pattern is {own}; give the same layers "
                "for the trunk and for a depth."
            )


def _check_gpt_as_hybrid(pattern: str, stored: Namespace, said: str) -> None:
    """Check whether Megatron's loader reads a GPT's checkpoint into layers of this pattern: only without MTP layers.

    Raises:
        ValueError: it does not.
    """
    depths = getattr(stored, "mtp_num_layers", None)
    if depths or "/" in pattern:
        with_depths = f"with {depths} MTP layers" if depths else "without MTP layers"
        raise ValueError(
            f"{said} a GPT of {stored.num_layers} layers {with_depths}, and --hybrid-layer-pattern is {pattern}, but "
            "MTP layers are not loaded from one form into the other; make a hybrid checkpoint of it by megatron-mtp "
            "convert gpt-to-hybrid, and load that."
        )
    halves = {"attention": "*+", "an MLP or MoE": "-E"}
    for kind, symbols in halves.items():
        if (layers := sum(map(pattern.count, symbols))) != stored.num_layers:
            raise ValueError(
                f"{said} a GPT of {stored.num_layers} layers, and --hybrid-layer-pattern {pattern} has {layers} of "
                f"{kind}; give as many."
            )


def check_positions(plan: LoadPlan, args: Namespace, stored: Namespace, source: str) -> LoadPlan:
    """Return the plan with a message for each rotary setting that differs from the checkpoint's training.

    Raises:
        ValueError: a setting differs and the run resumes the training rather than starting a new one.
    """
    for name in (*POSITIONS, *scaling_arguments(bool(args.multi_latent_attention))):
        own = getattr(args, name, None)
        theirs = getattr(stored, name, own)
        if theirs == own:
            continue
        said = f"{source} was trained with {name} {theirs}, and this run has {own}"
        if not plan.finetune:
            raise ValueError(
                f"{said}; give the flags of its training, or --use-checkpoint-args, or --finetune for a new run with "
                "other positions."
            )
        plan = plan.then(said)
    return plan


# --- the draft vocabulary --------------------------------------------------------------------------------------------


def _of_draft_vocabulary(
    plan: LoadPlan, args: Namespace, settings: MTPConfig, loaded: tuple[str, Path] | None
) -> LoadPlan:
    """Return the plan with the draft vocabulary; every rank computes the same list, before there is a process group.

    Raises:
        ValueError: the flags do not fit the checkpoint, the data, the vocabulary or the layout.
    """
    stored = None if loaded is None else _stored_draft_vocabulary(loaded[1], args)
    if stored is not None and loaded is not None:
        checkpoint = f"{FLAGS[loaded[0]]} {getattr(args, loaded[0])}"
        _check_same(stored, settings, checkpoint)
        tokens, source = stored.tolist(), f"as {checkpoint} has them"
    elif settings.mtp_draft_vocab_file is not None:
        tokens = tokens_of_file(Path(settings.mtp_draft_vocab_file), get_tokenizer().vocab_size)
        source = f"those of {settings.mtp_draft_vocab_file}"
    elif settings.mtp_draft_vocab_size is not None:
        tokens, source = _counted(args, settings.mtp_draft_vocab_size)
    else:
        return plan
    _check_slices(tokens, args)
    new_heads = loaded is not None and stored is None
    starts_anew = new_heads and args.drafter is not None and not plan.finetune  # its optimizer has no such rows
    begins = "; starting as with --finetune" if starts_anew else ""
    return plan.then(
        f"the MTP layers draft {len(tokens)} of {args.padded_vocab_size} tokens, {source}{begins}",
        draft_vocabulary=torch.tensor(tokens),
        new_heads=new_heads,
        finetune=plan.finetune or starts_anew,
    )


def _stored_draft_vocabulary(folder: Path, args: Namespace) -> Tensor | None:
    """Return the tokens that the checkpoint drafts; a drafter and MTP layers in one checkpoint share a list.

    Raises:
        ValueError: they have two.
    """
    found = stored_draft_vocabulary(folder, of_drafter=only_drafter(args) is not None)
    if has_both(args) and (folder / FORMAT).exists() and DistReader(folder).has_drafter:
        lists = found, stored_draft_vocabulary(folder, of_drafter=True)
        if (depths := stored_depths(folder)) is not None and not depths.layers:
            return lists[1]
        if len({None if one is None else tuple(one.tolist()) for one in lists}) > 1:
            raise ValueError(
                f"the drafter of {folder} and its MTP layers draft other tokens, but together they have one "
                "list; go on with one of them."
            )
    return found


def _check_same(stored: Tensor, settings: MTPConfig, source: str) -> None:
    size, file = settings.mtp_draft_vocab_size, settings.mtp_draft_vocab_file
    if size is not None and size != stored.numel():
        raise ValueError(
            f"{SIZE} is {size}, but the MTP layers of {source} were trained to draft {stored.numel()} tokens; "
            "leave the flag out to go on with those, or start from a checkpoint without MTP layers."
        )
    if file is not None and tokens_of_file(Path(file), get_tokenizer().vocab_size) != stored.tolist():
        raise ValueError(
            f"{FILE} is {file}, but the MTP layers of {source} were trained to draft {stored.numel()} other "
            "tokens; leave the flag out to go on with those, or start from a checkpoint without MTP layers."
        )


def _counted(args: Namespace, size: int) -> tuple[list[int], str]:
    vocab_size: int = get_tokenizer().vocab_size
    if size > vocab_size:
        raise ValueError(f"{SIZE} is {size}, and the tokenizer has {vocab_size} tokens; give at most that.")
    blend, per_split = get_blend_and_blend_per_split(args)
    prefixes, weights = blend or (per_split or [None])[0] or ([], None)
    if args.mock_data or not prefixes or any("://" in prefix for prefix in prefixes):
        raise ValueError(
            f"{SIZE} is {size}, but tokens are counted in local .bin/.idx files (--data-path) alone; give {FILE}, a "
            "text file with one token id on every line."
        )
    tokens, share = most_frequent(prefixes, weights, size, vocab_size)
    return tokens, f"the most frequent, {share:.1%} of the data"


def _check_slices(tokens: list[int], args: Namespace) -> None:
    """Refuse a slice of the head without drafted tokens: every tensor-parallel rank drafts from its own slice."""
    ranks = args.tensor_model_parallel_size
    width = args.padded_vocab_size // ranks
    empty = [rank for rank in range(ranks) if not any(token // width == rank for token in tokens)]
    if empty:
        raise ValueError(
            f"--tensor-model-parallel-size is {ranks}, and of the {len(tokens)} draft tokens none has an id from "
            f"{empty[0] * width} to {empty[0] * width + width - 1}, the slice of one rank; draft more tokens, or give "
            "fewer ranks."
        )
