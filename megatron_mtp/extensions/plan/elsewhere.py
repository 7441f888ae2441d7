"""Handles files, GPUs and libraries of a job that are missing on this machine.

Megatron's own parser checks the flags as if this machine had GPUs and all libraries.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core import utils as megatrons_versions
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from megatron_mtp.megatron.parser import CUDA, arguments_without
from megatron_mtp.model.swapped import having
from megatron_mtp.spec.config import flag_of
from megatron_mtp.training.checks import check_hub
from megatron_mtp.training.documents import named_prefixes

TE_NAME = "Transformer Engine"
OF_LIBRARIES: dict[str, tuple[str, Any]] = {
    "fp8": (TE_NAME, None),
    "fp4": (TE_NAME, None),
    "fp8_param": (TE_NAME, False),
    "fp4_param": (TE_NAME, False),
    "moe_permute_fusion": (TE_NAME, False),
    "moe_router_fusion": (TE_NAME, False),
    "tp_comm_overlap": (TE_NAME, False),
    "fine_grained_activation_offloading": (TE_NAME, False),
    "moe_enable_deepep": ("DeepEP", False),
}
"""Configuration fields that need a library, with that library and their values without it."""

CHECKED_KERNELS = {
    rope_utils: ("fused_apply_rotary_pos_emb",),
    moe_utils: (
        *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
        *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
    ),
}
"""Transformer Engine kernels that Megatron looks for when it checks flags, by importing module."""

CHECKED_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_GRAPHS_USE_NODE_PRIORITY": "1",
    "NVTE_CPU_OFFLOAD_V1": "1",
}
"""Environment variables that Megatron reads when it checks flags."""

TOKENIZER = ("tokenizer_model", "vocab_file", "merge_file")
CHECKPOINT = ("load", "pretrained_checkpoint")
DATA_LISTS = ("data_args_path", "per_split_data_args_path")
FILES = (*TOKENIZER, *CHECKPOINT, *DATA_LISTS, "mtp_draft_vocab_file", "te_precision_config_file")
"""Arguments that name files read before a run."""


def without_absent_files(argv: list[str], given: Namespace) -> dict[str, str]:
    """Remove flags for files that are missing on this machine. Return a line for each, by argument name.

    Raises:
        ValueError: a plan needs one of the missing files.
    """
    named = {name: getattr(given, name) for name in FILES if getattr(given, name) is not None}
    absent = {name: path for name, path in named.items() if "://" not in path and not Path(path).exists()}
    if given.load == given.save:
        absent.pop("load", None)  # the first start has nothing to load
    for name in CHECKPOINT:
        if name in absent and given.use_checkpoint_args:
            raise ValueError(
                f"--use-checkpoint-args was given, but {flag_of(name)} {absent[name]} is not on this machine; give "
                "the flags of its model in the place of --use-checkpoint-args."
            )
    instead: list[str] = []
    if _needs_tokenizer(given, absent):
        absent.setdefault("tokenizer_type", given.tokenizer_type)
        instead = ["--tokenizer-type", "NullTokenizer"]
    if given.mtp_draft_vocab_size is not None and _data_is_elsewhere(given, absent):
        absent["mtp_draft_vocab_size"] = f"{given.mtp_draft_vocab_size}, which counts tokens of --data-path"
    argv[:] = [*_without(argv, {flag_of(name) for name in absent}), *instead]
    return {name: f"not on this machine, and planned without: {flag_of(name)} {path}" for name, path in absent.items()}


def _needs_tokenizer(given: Namespace, absent: dict[str, str]) -> bool:
    """Return whether --vocab-size must replace a tokenizer that is missing here.

    Raises:
        ValueError: --vocab-size is not given.
    """
    try:
        check_hub(given)
    except ValueError as error:
        if given.vocab_size is None:
            said = str(error).rpartition(";")[0]
            raise ValueError(f"{said}; give --vocab-size, and the plan needs no tokenizer.") from None
        return True
    if given.vocab_size is None and given.tokenizer_type == "HuggingFaceTokenizer":
        absent.pop("tokenizer_model", None)  # the tokenizer comes from the Hub
    for name in TOKENIZER:
        if name in absent and given.vocab_size is None:
            raise ValueError(
                f"{flag_of(name)} is {absent[name]}, which is not on this machine; give --vocab-size, and the plan "
                "needs no tokenizer."
            )
    return any(name in absent for name in TOKENIZER)


def _data_is_elsewhere(given: Namespace, absent: dict[str, str]) -> bool:
    if any(name in absent for name in DATA_LISTS):
        return True
    return not all(Path(f"{prefix}.idx").exists() for prefix in named_prefixes(given))


def _without(argv: list[str], flags: set[str]) -> list[str]:
    """Remove flags with one value each from a command line."""
    kept, words = list[str](), iter(argv)
    for word in words:
        if word in flags:
            next(words, None)
        elif word.split("=")[0] not in flags:
            kept.append(word)
    return kept


@contextmanager
def machine_of_the_job() -> Iterator[None]:
    """Let Megatron check flags, within the context, as if this machine had any GPU and all libraries."""
    newest = SimpleNamespace(major=99)
    manager = "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"
    parts = manager.split(".")
    stubs = {".".join(parts[: end + 1]): ModuleType(part) for end, part in enumerate(parts)}
    stubs[manager].LocalCheckpointManager = object  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(_importable(stubs))
        stack.enter_context(having([megatrons_versions], _te_version=Version("99")))
        stack.enter_context(
            having(
                [torch.cuda],
                get_device_capability=lambda *_: (newest.major, 0),
                get_device_properties=lambda *_: newest,
            )
        )
        for module, names in CHECKED_KERNELS.items():
            stack.enter_context(having([module], **dict.fromkeys(names, object())))
        yield


@contextmanager
def _importable(stubs: Mapping[str, ModuleType]) -> Iterator[None]:
    """Make stub modules importable by name within the context, whatever is installed."""
    before = {name: sys.modules[name] for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(before)


def without_libraries(config: TransformerConfig) -> list[str]:
    """Reset fields of a checked configuration that need missing libraries. Return a line that names the libraries."""
    needed = dict[str, None]()
    for name, (library, without) in OF_LIBRARIES.items():
        if getattr(config, name) != without:
            setattr(config, name, without)
            needed[library] = None
    if config.experimental_attention_variant is not None:
        needed[TE_NAME] = None
    if config.moe_token_dispatcher_type == "flex":
        needed["HybridEP" if config.moe_flex_dispatcher_backend == "hybridep" else "DeepEP"] = None
    dispatcher = "alltoall" if config.moe_token_dispatcher_type == "flex" else config.moe_token_dispatcher_type
    plain = arguments_without(CUDA) | {"moe_token_dispatcher_type": dispatcher, "cuda_graph_impl": "none"}
    for name, value in plain.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return [f"planned as for a machine with {' and '.join(needed)}", ""] if needed else []
