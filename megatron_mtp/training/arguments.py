"""Arguments: Megatron's parser with our flags, the flags this machine needs, the checks before a model is built.

Every check raises ValueError with one sentence that names the flag, the value and the remedy.
"""

import math
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.training import get_tokenizer
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.checkpointing import checkpoint_exists, get_load_checkpoint_path_by_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_mtp.checkpoint.mcore.model import check_trainable
from megatron_mtp.checkpoint.mcore.stored_depths import absent_layers
from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.config import MTPConfig
from megatron_mtp.data.checks import check_data_prefixes, check_split, check_tokenizer, check_weights, split_weights
from megatron_mtp.losses import depth_loss
from megatron_mtp.model.arguments import APEX, CUDA, MODEL_ARGUMENTS, TE, flags_without
from megatron_mtp.model.build import MTPGPTModelConfig, config_of
from megatron_mtp.patches.unpickling import CATALOGUE
from megatron_mtp.platform.kernels import fuses_weight_gradients, transformer_engine_works
from megatron_mtp.training.chat import check_chat_files
from megatron_mtp.training.console import say
from megatron_mtp.training.draft_vocabulary import draft_vocabulary
from megatron_mtp.training.flag_checks import check_ranges, check_relations, check_tokenizer_folder
from megatron_mtp.training.flags import add_mtp_arguments
from megatron_mtp.training.loading import check_load, check_optimizer, check_positions
from megatron_mtp.training.refusals import megatrons_refusals

ArgumentsProvider = Callable[[ArgumentParser], ArgumentParser]
"""Megatron's `extra_args_provider`: takes its parser, and returns it with flags added."""


def mtp_config_from_args(args: Namespace) -> MTPConfig:
    """Raises ValueError where a flag has a value that is not allowed."""
    settings = MTPConfig(**{field.name: getattr(args, field.name) for field in fields(MTPConfig)})
    depth_loss(settings)  # checks its name and settings
    return settings


def set_machine_flags(argv: list[str], on_cpu: bool) -> str | None:
    """Append the flags that this machine needs to `argv`; returns a line that says so, or None if it needs none."""
    if on_cpu:
        lack, running = CUDA, "running on the CPU over gloo"
    elif not transformer_engine_works():
        lack, running = TE, "running with Megatron's own modules"
    elif not fuses_weight_gradients():
        lack, running = APEX, "running"
    else:
        return None
    words = flags_without(lack)
    if lack == APEX and words[0] in argv:
        return None
    argv += words
    return f"no {lack}: {running} with {' '.join(words)}"


def parse_checked_args() -> tuple[Namespace, MTPGPTModelConfig]:
    """Parse, check and validate `sys.argv`; Megatron's global arguments and tokenizer are set when this returns."""
    args = parse_run_args()
    if args.rank == 0:
        check_data(args)
    return args, checked_model_config(args)


def parse_run_args(
    extra_args_provider: ArgumentsProvider | None = None, args_defaults: dict[str, Any] | None = None
) -> Namespace:
    """The same without a look at the corpus and the checkpoint's depths; both arguments are Megatron's.

    Raises:
        ValueError: a flag has a value that is not allowed.
    """

    def add_arguments(parser: ArgumentParser) -> ArgumentParser:
        return add_mtp_arguments(parser if extra_args_provider is None else extra_args_provider(parser))

    with megatrons_refusals():
        given = parse_args(add_arguments)
    check_ranges(given)
    check_tokenizer_folder(given)
    if not given.use_checkpoint_args:
        check_flags(given)
    check_load(given)
    stored = checkpoint_arguments(given)

    def add_stored_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = add_arguments(parser)
        parser.set_defaults(**stored)
        return parser

    with megatrons_refusals():
        args = parse_and_validate_args(extra_args_provider=add_stored_arguments, args_defaults=args_defaults or {})
    if args.use_checkpoint_args:
        check_flags(args)  # only now are they known
    return args


def checked_model_config(args: Namespace, **gpt_config: Any) -> MTPGPTModelConfig:
    """The model that validated arguments describe, `gpt_config` being further arguments of `gpt_config_from_args`.

    Raises:
        ValueError: the checkpoint to load lacks depths, and no flag says how to make them; or it has other ones.
    """
    with megatrons_refusals():
        model_config = config_of(args, **gpt_config)
    model_config.mtp = mtp_config_from_args(args)
    args.vocab_size = true_vocab_size(args)  # checkpoints keep the arguments
    model_config.true_vocab_size = args.vocab_size
    model_config.mtp_init_seed = args.seed
    model_config.absent_mtp_layers = check_checkpoint(args, model_config.mtp)
    check_positions(args)
    check_optimizer(args)
    model_config.draft_vocabulary, model_config.absent_draft_vocabulary = draft_vocabulary(args, model_config.mtp)
    return model_config


def true_vocab_size(args: Namespace) -> int:
    """Rows of the vocabulary that stand for tokens: the tokenizer's ids or, if these are fewer, `--vocab-size`.

    A converted model may have more rows than its tokenizer has tokens; they are part of its softmax.
    """
    tokenizer = get_tokenizer()
    known = [tokenizer.vocab_size, args.vocab_size or 0]
    if args.tokenizer_type == "HuggingFaceTokenizer":
        known.append(1 + max(tokenizer.inv_vocab))  # ids may have gaps
    return min(max(known), args.padded_vocab_size)


def checkpoint_arguments(args: Namespace) -> dict[str, Any]:
    """What `--use-checkpoint-args` finds of the model, as defaults; Megatron's own misses latent attention and more.

    Raises:
        ValueError: the checkpoint is a conversion of a model that Megatron cannot run.
    """
    if not (args.use_checkpoint_args and checkpoint_exists(args.load)):
        return {}
    folder = Path(get_load_checkpoint_path_by_args(args))
    if not (folder / CATALOGUE).is_file():
        return {}
    found = DistReader(folder).common()["args"]
    check_trainable(found, f"--load {args.load}")
    stored = vars(found)
    return {name: stored[name] for name in MODEL_ARGUMENTS if stored.get(name) is not None}


def check_flags(args: Namespace) -> None:
    """What can be said of the flags alone."""
    settings = mtp_config_from_args(args)
    if args.split is not None:
        split_weights(args.split)
    if args.eval_interval is None:
        raise ValueError(
            "--eval-interval is missing; give the number of steps between evaluations (more than --train-iters for "
            "none before the end)."
        )
    if args.save is not None and args.save_interval is None:
        raise ValueError(f"--save is {args.save}, but --save-interval is missing; give the steps between checkpoints.")
    if (pattern := args.hybrid_layer_pattern or args.hybrid_override_pattern) is not None:
        raise ValueError(
            f"--hybrid-layer-pattern is {pattern}, but this script builds transformers alone; drop the flag, or use "
            "Megatron's pretrain_hybrid.py."
        )
    if args.logits_load_dir is not None:
        raise ValueError(
            "--logits-load-dir was given, but training on a teacher's stored logits is left to Megatron's own script; "
            "drop the flag, or use that script."
        )
    _check_folder("--mtp-metrics-dir", settings.mtp_metrics_dir)
    _check_folder("--save", args.save)
    _check_sequences(args)
    if args.mtp_num_layers is not None:
        _check_depths(args, settings)
    elif settings.mtp_train_only:
        raise ValueError("--mtp-train-only was given without --mtp-num-layers; say how many depths to train.")
    elif settings.mtp_draft_vocab_size is not None or settings.mtp_draft_vocab_file is not None:
        raise ValueError("a draft vocabulary was given without --mtp-num-layers; say how many depths draft from it.")
    check_relations(args)


def _check_folder(flag: str, named: str | None) -> None:
    """It is made when there is something to write, which must not be when it turns out that it cannot."""
    if named is None or "://" in named:
        return
    there = next(path for path in (Path(named), *Path(named).absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        kind = "a link to nowhere" if there.is_symlink() else "a file"
        raise ValueError(f"{flag} is {named}, but {there} is {kind}; name a folder.")


def _check_sequences(args: Namespace) -> None:
    """Packed rows, and how sequences are cut for context parallelism."""
    packed = args.sft or args.dataloader_inter_document_masking
    if args.hybrid_context_parallel:
        raise ValueError(
            "--hybrid-context-parallel was given, which this script does not cut batches for; give "
            "--context-parallel-size alone, or use Megatron's own script."
        )
    if args.dataloader_inter_document_masking and args.context_parallel_size > 1:
        raise ValueError(
            f"--dataloader-inter-document-masking was given with --context-parallel-size {args.context_parallel_size}, "
            "which cannot cut documents of any length; give --reset-attention-mask in its place."
        )
    if packed and args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        raise ValueError(
            f"--micro-batch-size is {args.micro_batch_size}, but a pipeline takes one packed row at a time; give 1."
        )


def _check_depths(args: Namespace, settings: MTPConfig) -> None:
    depths, factor = args.mtp_num_layers, args.mtp_loss_scaling_factor
    if depths < 1:
        raise ValueError(
            f"--mtp-num-layers is {depths}; give 1 or more, or leave the flag out to train without depths."
        )
    if factor is not None and not 0 <= factor < math.inf:
        raise ValueError(f"--mtp-loss-scaling-factor is {factor}; give 0 or more (0.1 is Megatron's default).")
    settings.loss_weights(depths)
    has_checkpoint = any(map(checkpoint_exists, (args.load, args.pretrained_checkpoint)))
    if settings.mtp_init is not None and not has_checkpoint:
        raise ValueError(
            f"--mtp-init is {settings.mtp_init}, but there is no checkpoint to add depths to (--load {args.load}); "
            "give --load or --pretrained-checkpoint with one, or drop --mtp-init."
        )
    if settings.mtp_train_only and not has_checkpoint:
        raise ValueError(
            f"--mtp-train-only was given with --load {args.load}, where there is no checkpoint of a trunk; give one "
            "that exists, or --pretrained-checkpoint."
        )
    if args.position_embedding_type not in ("rope", "none"):
        raise ValueError(
            f"--position-embedding-type is {args.position_embedding_type}, which MTP cannot use, since a depth sees "
            "later tokens at earlier positions; give rope or none."
        )
    if settings.mtp_architecture == "parallel" and args.mtp_use_repeated_layer:
        raise ValueError(
            "--mtp-use-repeated-layer was given with --mtp-architecture parallel, where one repeated layer would make "
            "all depths the same; drop one of the two."
        )
    if "quantile_balancing" in (args.moe_router_load_balancing_type or ()):
        raise ValueError(
            "--moe-router-load-balancing-type is quantile_balancing, which cannot leave out the positions that a depth "
            "shifts in; give another type, such as aux_loss or none."
        )
    if args.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "--overlap-moe-expert-parallel-comm was given with --mtp-num-layers, whose depths its schedule does not "
            "know; drop the flag."
        )


def check_data(args: Namespace) -> None:
    """Whether the corpus is there, whole, and made with a vocabulary that fits."""
    if args.mock_data or (args.skip_train and args.data_path is None):
        return
    for given in (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path):
        check_weights(given or [])
    prefixes = _prefixes(args)
    if args.sft:
        check_chat_files(prefixes)
        return _check_conversations(args)
    if not prefixes:
        raise ValueError(
            "--data-path is missing; give the prefix of a .bin/.idx pair (megatron-mtp preprocess makes one), or "
            "--mock-data."
        )
    if args.skip_train and args.data_path is not None and not any(split_weights(args.split)[1:]):
        raise ValueError(f"--split is {args.split}, which leaves nothing to evaluate on; give 0,1,0.")
    check_data_prefixes(prefixes, true_vocab_size(args))
    if args.data_path is not None and args.split is not None:
        check_split(prefixes, args.split)
    if args.fim_data:
        _check_fim_tokens(args)
    if args.tokenizer_model is not None:
        check_tokenizer(prefixes, args.tokenizer_model)


def _check_conversations(args: Namespace) -> None:
    """Whether the tokenizer has what --sft-tokenizer-prompt-format needs: a token to fill rows up with, a template."""
    settings = get_tokenizer()._tokenizer._prompt_config
    lacking = "the padding token" if settings.pad_token_id is None else "a chat template"
    if settings.pad_token_id is None or settings.custom_chat_template is None:
        raise ValueError(
            f"--tokenizer-model {args.tokenizer_model} lacks {lacking} that --sft-tokenizer-prompt-format "
            f"{args.sft_tokenizer_prompt_format} needs; give another format, or a tokenizer that has it."
        )


def _check_fim_tokens(args: Namespace) -> None:
    """Whether the tokenizer has the tokens that --fim-data marks its parts with."""
    tokens = [getattr(args, f"fim_{part}_token") for part in ("prefix", "middle", "suffix", "pad", "eod")]
    ids = get_tokenizer()._tokenizer.tokens_to_ids(tokens)
    if absent := [token for token, number in zip(tokens, ids, strict=True) if number is None]:
        raise ValueError(
            f"--fim-data marks text with {' '.join(absent)}, which the tokenizer lacks; name tokens that it has with "
            "--fim-prefix-token, --fim-middle-token, --fim-suffix-token, --fim-pad-token and --fim-eod-token."
        )


def check_checkpoint(args: Namespace, settings: MTPConfig) -> tuple[int, ...]:
    """The MTP layers that the checkpoint to load lacks; where there are some, a new run starts from its weights."""
    load_arg = "load" if checkpoint_exists(args.load) else "pretrained_checkpoint"
    if args.mtp_num_layers is None or not checkpoint_exists(getattr(args, load_arg)):
        return ()
    folder = Path(get_load_checkpoint_path_by_args(args, load_arg))
    layers = 1 if args.mtp_use_repeated_layer else args.mtp_num_layers
    absent = absent_layers(folder, layers, settings.mtp_architecture == "sequential", settings.mtp_init)
    if absent:
        args.finetune = True  # the stored optimizer knows nothing of the new depths
        if args.rank == 0:
            say(f"> depths that {folder} lacks: --mtp-init {settings.mtp_init}; starting as with --finetune")
    return absent


def _prefixes(args: Namespace) -> list[str]:
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [blend] if blend is not None else list(per_split or [])
    return [prefix for one in blends if one is not None for prefix in one[0]]
