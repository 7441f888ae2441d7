"""Arguments: Megatron's parser with our flags and this machine's flags, and all checks before a model is built.

Every check raises ValueError with one sentence that names the flag, its value and how to fix it.
"""

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.training import get_tokenizer
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.checkpointing import checkpoint_exists, get_load_checkpoint_path_by_args

from megatron_mtp.losses.table import check_loss
from megatron_mtp.megatron.checkpoint.catalogue import CATALOGUE
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.machine import fuses_weight_gradients, multiplies_bfloat16, transformer_engine_works
from megatron_mtp.megatron.model_arguments import MODEL_ARGUMENTS
from megatron_mtp.megatron.parser import APEX, CUDA, TE, flags_without
from megatron_mtp.megatron.patterns import without_stages
from megatron_mtp.model.arguments import MTPModelConfig, check_trainable, config_of
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import WITH_MTP, drafted_steps, has_both, heads_of, only_drafter, trained_depths
from megatron_mtp.training.checks import check_data, check_flags, check_hub, check_ranges, check_supported, check_trunk
from megatron_mtp.training.datasets import OF_CHAT_FLAGS, reads_chats
from megatron_mtp.training.flags import add_mtp_arguments
from megatron_mtp.training.loading import check_load, loaded_iteration, plan_load
from megatron_mtp.training.needed import OF_A_MODEL, OF_A_RUN, OF_DATA, Needed, check_needed
from megatron_mtp.training.settings import (
    counted_depths,
    drafter_arguments,
    leave_out_evaluations,
    of_drafter,
    with_changes,
    without_depths,
)
from megatron_mtp.training.short_log import say

ArgumentsProvider = Callable[[ArgumentParser], ArgumentParser]
"""Megatron's `extra_args_provider`: takes its parser, and returns it with flags added."""


def mtp_config_from_args(args: Namespace) -> MTPConfig:
    """Build the MTPConfig. Raise ValueError if a flag has a value that is not allowed."""
    settings = MTPConfig(**{field.name: getattr(args, field.name) for field in fields(MTPConfig)})
    heads = heads_of(settings, trained_depths(args), drafted_steps(args))
    check_loss(*(heads[0].settings if heads else settings).phases())
    return settings


def set_machine_flags(argv: list[str], on_cpu: bool) -> str | None:
    """Append the flags that this machine needs to `argv`.

    Return a line that reports them, or None if there are none.
    """
    if on_cpu:
        lack, running = CUDA, "running on the CPU over gloo"
    elif not transformer_engine_works():
        lack, running = TE, "running with Megatron's own modules"
    elif "--transformer-impl local" in " ".join(argv).replace("=", " ") and not fuses_weight_gradients():
        lack, running = APEX, "running"  # Transformer Engine's layers fuse weight gradients without Apex
    else:
        return None
    words = flags_without(lack)
    if lack == APEX and words[0] in argv:
        return None
    argv += words
    note = f"no {lack}: {running} with {' '.join(words)}"
    if on_cpu and "--bf16" in argv and not multiplies_bfloat16():
        note += "; this CPU has no bfloat16 products and may train several times as fast without --bf16"
    return note


CUDA_ALONE = {
    "--cuda-graph-impl": ("none", "layers of trunk and MTP are recorded by CUDA"),
    "--cpu-offloading-num-layers": (0, "Transformer Engine takes activations, of the trunk's layers alone, to the CPU"),
}
"""Flags that have no use on a CPU, with the value that turns them off, and the reason."""


def check_device_flags(args: Namespace) -> None:
    """Raise ValueError for a flag that needs a CUDA device."""
    for flag, (idle, why) in CUDA_ALONE.items():
        if getattr(args, flag.removeprefix("--").replace("-", "_"), idle) not in (idle, None):
            raise ValueError(f"{flag} was given on a machine without a CUDA device, but {why}; drop the flag.")


def set_connections(argv: list[str]) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS to 1 if ranks share a layer or a sequence. CUDA reads it at startup."""
    words = " ".join(argv).replace("=", " ")
    others = "--(use-torch-fsdp2|use-megatron-fsdp|overlap-moe-expert-parallel-comm)"
    if re.search(r"--(tensor-model|context)-parallel-size (?!1\b)", words) and not re.search(others, words):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def parse_checked_args(on_cpu: bool) -> tuple[Namespace, MTPModelConfig]:
    """Parse, check and validate `sys.argv`. Sets Megatron's global arguments and tokenizer.

    With `on_cpu`, flags that need a CUDA device are refused.
    """
    args = parse_run_args(needed=(*OF_A_MODEL, *OF_A_RUN, *OF_DATA))
    if on_cpu:
        check_device_flags(args)
    if args.chat is not None:
        OF_CHAT_FLAGS["chat"](args)
    if args.rank == 0:
        check_data(args, true_vocab_size(args))
    leave_out_evaluations(args)
    return args, checked_model_config(args)


def parse_run_args(
    extra_args_provider: ArgumentsProvider | None = None,
    args_defaults: dict[str, Any] | None = None,
    plans: bool = False,
    needed: Sequence[Needed] = OF_A_MODEL,
) -> Namespace:
    """Parse the flags of a run and fill in those that the checkpoint stores. Does not open the corpus.

    Args:
        extra_args_provider, args_defaults: as in Megatron.
        plans: whether this only plans a job: nothing is written, and the trunk does not need to exist here.
        needed: required flags.

    Raises:
        ValueError: a flag has a value that is not allowed, or required flags are missing.
    """

    def add_arguments(parser: ArgumentParser) -> ArgumentParser:
        return add_mtp_arguments(parser if extra_args_provider is None else extra_args_provider(parser))

    given, settled = read_flags(add_arguments)
    defaults = {name: value for name, value in (args_defaults or {}).items() if getattr(given, name, None) is None}
    check_needed(with_changes(given, defaults), needed)
    if not given.use_checkpoint_args:
        check_flags(given, mtp_config_from_args(given))
    if not plans:
        check_trunk(given)
    check_load(given, mends=not plans)

    def add_stored_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = add_arguments(parser)
        parser.set_defaults(**stored_values(given))
        return parser

    args = parse_and_validate_args(extra_args_provider=add_stored_arguments, args_defaults=args_defaults or {})
    vars(args).update(merged(given, args, settled))
    check_supported(args)  # by now, older flags have their newer names
    if args.use_checkpoint_args:
        check_flags(args, mtp_config_from_args(args))  # Megatron has now read them from the checkpoint
    return args


def read_flags(add_arguments: ArgumentsProvider) -> tuple[Namespace, dict[str, Any]]:
    """Parse a command line with the settings derived from it, and return the arguments that no checkpoint changes.

    Raises:
        ValueError: a flag has a value that is not allowed, or two flags contradict each other.
    """
    given = parse_args(add_arguments)
    unused = without_depths(given) if given.mtp_num_layers == 0 and given.drafter is None else {}
    older = {"position_embedding_type": "rope"} if given.use_rotary_position_embeddings else {}
    given = with_changes(given, unused | older)  # Megatron does this only after checking the positions of MTP layers
    check_ranges(given)
    check_hub(given)
    given = with_changes(given, of_drafter(given))
    given = with_changes(given, {"mtp_num_layers": counted_depths(given), "reads_chats": reads_chats(given)})
    settled = {"reads_chats": given.reads_chats}
    return given, settled | ({**unused, "mtp_num_layers": None} if unused else {})


def stored_values(given: Namespace) -> dict[str, Any]:
    """Read the arguments that the checkpoint stores, if --use-checkpoint-args is set, and the drafter's.

    Raises:
        ValueError: the checkpoint was converted from a model that Megatron cannot run.
    """
    older = {"position_embedding_type": "rope"} if given.use_rotary_position_embeddings else {}
    stored = checkpoint_arguments(given) | older
    drafter = given.drafter or stored.get("drafter")
    if drafter is None:
        return stored
    chosen = stored if given.drafter is None else vars(given)
    stored |= {WITH_MTP: chosen.get(WITH_MTP, False), "drafter": drafter}
    return stored | drafter_arguments(with_changes(given, stored))


def merged(given: Namespace, validated: Namespace, settled: dict[str, Any]) -> dict[str, Any]:
    """Return changes to Megatron's validated arguments, where it prefers the checkpoint's with --use-checkpoint-args.

    Args:
        given, settled: results of `read_flags`.
        validated: Megatron's arguments, with the defaults of `stored_values`.
    """
    has_mask = validated.reset_attention_mask and not settled["reads_chats"]  # attention without a mask is causal
    changes = {
        **({"mtp_use_repeated_layer": True} if given.mtp_use_repeated_layer else {}),
        **settled,
        "create_attention_mask_in_dataloader": validated.create_attention_mask_in_dataloader and has_mask,
        WITH_MTP: has_both(validated),
    }
    args = with_changes(validated, changes)
    if args.drafter is not None:
        changes |= drafter_arguments(args)
    if args.use_checkpoint_args and given.mtp_num_layers is not None and only_drafter(args) is None:
        args = with_changes(args, {**changes, "mtp_num_layers": given.mtp_num_layers})
        changes["mtp_num_layers"] = counted_depths(args)
    return changes


def checked_model_config(args: Namespace, **given: Any) -> MTPModelConfig:
    """Build the model configuration from validated arguments; `given` are additional arguments of `config_of`.

    Raises:
        ValueError: the checkpoint lacks the MTP layers and no flag specifies how to initialize them, or it has
            different ones.
    """
    model_config = config_of(args, **given)
    model_config.mtp = mtp_config_from_args(args)
    args.vocab_size = true_vocab_size(args)  # checkpoints store the arguments
    model_config.true_vocab_size = args.vocab_size
    model_config.mtp_init_seed = args.seed
    plan = plan_load(args, model_config.mtp)
    args.finetune = plan.finetune
    if args.rank == 0:
        for line in plan.messages:
            say(f"> {line}")
    model_config.loads_trunk = args.mtp_train_only and loaded_iteration(args) is not None
    model_config.absent = plan.absent
    model_config.draft_vocabulary, model_config.absent_draft_vocabulary = plan.draft_vocabulary, plan.new_heads
    return model_config


def true_vocab_size(args: Namespace) -> int:
    """Return the number of vocabulary rows that are tokens: the tokenizer's, or `--vocab-size` if that is smaller.

    A converted model may have more rows than its tokenizer has tokens; these rows are part of its softmax.
    """
    tokenizer = get_tokenizer()
    known = [tokenizer.vocab_size, args.vocab_size or 0]
    if args.tokenizer_type == "HuggingFaceTokenizer":
        known.append(1 + max(tokenizer.inv_vocab))  # ids may have gaps
    return min(max(known), args.padded_vocab_size)


def checkpoint_arguments(args: Namespace) -> dict[str, Any]:
    """Return the model arguments found by `--use-checkpoint-args`, as defaults.

    Megatron's version misses latent attention.

    Raises:
        ValueError: Megatron cannot run the converted model, or `--vocab-size` is less than its number of tokens.
    """
    if not (args.use_checkpoint_args and checkpoint_exists(args.load)):
        return {}
    folder = Path(get_load_checkpoint_path_by_args(args))
    if not (folder / CATALOGUE).is_file():
        return {}
    found = DistReader(folder).common()["args"]
    check_trainable(found, f"--load {args.load}")
    stored = {name: value for name, value in vars(found).items() if name in MODEL_ARGUMENTS and value is not None}
    if args.vocab_size is not None and args.vocab_size < stored.get("vocab_size", 0):
        raise ValueError(
            f"--vocab-size is {args.vocab_size}, but the model of --load has {stored['vocab_size']} tokens, and the "
            "softmax of training would leave out the last ones; drop the flag, whose value --use-checkpoint-args finds."
        )
    pattern = stored.get("hybrid_layer_pattern")
    if pattern is not None and pattern.count(Symbols.PIPE) + 1 != args.pipeline_model_parallel_size:
        stored["hybrid_layer_pattern"] = without_stages(pattern)  # Megatron then splits the trunk evenly
    return stored
