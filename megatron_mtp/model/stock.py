"""Checks a model of Megatron's own class to which heads are attached, and prepares its embedding and its checkpoints.

The heads themselves are in stock_mtp.py and stock_drafter.py.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.random import _fork_rng
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.tensor import DTensor

from megatron_mtp.model.shared_embedding import attach_embedding
from megatron_mtp.spec import attached

if TYPE_CHECKING:
    pass

OWN = "own"
"""MTP layers with the layer pattern of the trunk's end."""

VOCABULARY = "draft_vocabulary"
"""Name of a drafter's buffer with its draft vocabulary."""

LEARNED = "learned_absolute"
"""Position embedding type that adds learned positions to token embeddings."""

Refused = list[tuple[Any, str]]
"""Checks: whether each fails, and its error message."""


# --- checks ----------------------------------------------------------------------------------------------------------


def refused_arguments(
    chunk: Any, heads: Sequence[attached.Head], weight: float | None, block: str, adopts: bool
) -> Refused:
    """Return checks of the arguments of `attach` against the model."""
    own, mtp = chunk.config.mtp_num_layers, attached.mtp_among(heads)
    depths = None if mtp is None else mtp.depths
    layers = 1 if adopts and chunk.config.mtp_use_repeated_layer else depths or own
    return [
        (
            mtp is not None and depths is None and not adopts,
            "the model has no MTP layers, and depths is None; give the number of new ones, or settings with a drafter.",
        ),
        (
            adopts and depths not in (None, own),
            f"the model has {own} MTP layers, and depths is {depths}; give None to train those.",
        ),
        (depths is not None and depths < 1, f"depths is {depths}; give 1 or more."),
        (
            mtp is not None and mtp.settings.mtp_unroll is not None and layers != 1,
            f"mtp_unroll is set, which repeats one MTP layer, and the model has {layers}; attach one.",
        ),
        (
            weight is not None and not 0 <= weight < inf,
            f"weight is {weight}; give 0 or more, such as 0.1, or None to ask for Attached.loss.",
        ),
        (
            any(head.settings.drafter for head in heads)
            and chunk.vp_stage is not None
            and chunk.pg_collection.pp.size() == 2
            and chunk.config.batch_p2p_comm,
            "batch_p2p_comm is on with virtual stages on two pipeline ranks, where Megatron swaps what goes forward "
            "with what goes back; set overlap_p2p_comm to True and batch_p2p_comm to False, as its flags do.",
        ),
        (
            block != OWN and (adopts or not hasattr(chunk, "hybrid_stack_spec")),
            f"block is '{block}', which is the pattern of a hybrid's new MTP layers; give 'own' to other models.",
        ),
    ]


def refused_models(chunk: Any, adopts: bool) -> Refused:
    """Return checks for models whose forward pass hooks cannot see, or that have no place for new layers.

    Args:
        chunk: a chunk of this rank's model.
        adopts: whether the model has its own MTP block, which is then used.
    """
    config, layers = chunk.config, chunk.mtp.layers if hasattr(chunk, "mtp") else ()
    learned, groups = chunk.position_embedding_type == LEARNED, chunk.pg_collection
    return [
        (
            not adopts and any(hasattr(each, "main_grad") or isinstance(each, DTensor) for each in chunk.parameters()),
            "the model is wrapped for data parallelism, whose buffers have no place for new layers; attach before it "
            "is wrapped: give attach to register_pre_wrap_hook.",
        ),
        (
            config.overlap_moe_expert_parallel_comm,
            "overlap_moe_expert_parallel_comm runs schedule plans, in which the MTP layers' states are not seen; turn "
            "the overlap off, or train by megatron-mtp train.",
        ),
        (
            config.cuda_graph_impl == "full_iteration",
            "cuda_graph_impl is full_iteration, whose replay does not run hooks; choose another.",
        ),
        (
            # The flag for hyper-connections differs between Megatron branches, so look for the module.
            any(type(each).__name__ == "HyperConnectionModule" for each in chunk.decoder.modules()),
            "the trunk's layers have hyper-connections, which give it several residual streams, and MTP layers read "
            "one; build the model without them.",
        ),
        (
            config.mtp_standalone,
            "the pipeline layout gives the MTP layers a stage of their own; put m before L in the last stage.",
        ),
        (
            not adopts and config.pipeline_model_parallel_layout is not None,
            "the pipeline layout has no place for new MTP layers; build the model with m before L in the last stage, "
            "or without a layout.",
        ),
        (
            config.fp8 and config.fp8_recipe == "delayed",
            "fp8_recipe is delayed, whose scales would be updated by the MTP layers' second pass; take another recipe.",
        ),
        (
            not adopts and learned and groups.pp.size() > 1,
            "learned_absolute positions are embedded on the first stage, and new MTP layers stand on the last; attach "
            "them in one stage.",
        ),
        (
            learned and groups.cp.size() > 1,
            "learned_absolute positions of later tokens lie on other context-parallel ranks; build the model with "
            "rope, or with a context_parallel_size of 1.",
        ),
        (
            adopts and chunk.post_process and not layers,
            f"mtp_num_layers is {config.mtp_num_layers}, and the last stage has no MTP block; build it with Megatron's "
            "mtp_block_spec, or with mtp_num_layers of None. If it shares its configuration with a model that has "
            "attached layers, give each model a copy of it.",
        ),
        (
            adopts and layers and is_frozen(chunk.mtp),
            FROZEN,
        ),
        *(refused_heads(chunk, chunk.output_layer) if chunk.post_process else []),
        (
            config.num_moe_experts is not None
            and "padding_mask" not in signature(MultiTokenPredictionLayer._proj_and_transformer_layer).parameters,
            "this megatron-core cannot leave the positions that an MTP layer shifts in out of the routing of experts; "
            "install 0.18 or a later one.",
        ),
        (
            not all(hasattr(layer, "_proj_and_transformer_layer") for layer in layers),
            "the model's MTP layers are not of Megatron's class; models of this package train by mtp_loss.",
        ),
    ]


def refused_heads(chunk: Any, owner: Any) -> Refused:
    """Return checks for output layers that compute more than their weight, or lack a row for each token.

    Args:
        owner: module that owns the output weight.
    """
    layer, rows = chunk.output_layer, chunk.vocab_size // chunk.pg_collection.tp.size()
    own, kind = getattr(layer, "weight", None), type(layer).__name__
    weights = own, getattr(owner, "weight", None)
    others = [] if layer is None else [name for name, each in layer.named_parameters() if each is not own]
    return [
        (
            layer is None or any(weight is not None and len(weight) != rows for weight in weights),
            f"the model's output layer ({kind}) does not have a row for each of the {chunk.vocab_size} tokens, which "
            "MTP layers need to draft; do not attach them to a critic or a classifier.",
        ),
        (
            others,
            f"the model's output layer ({kind}) has more parameters, {', '.join(others)}, which the MTP layers' loss "
            "would ignore, such as an adapter's; merge them into its weight, or remove the output layer from the "
            "adapter's targets.",
        ),
    ]


FROZEN = (
    "the model's MTP layers are frozen, as PEFT leaves them; let it target their modules too, or set requires_grad on "
    "model.mtp."
)


def is_frozen(block: torch.nn.Module) -> bool:
    """Return whether no parameter of the MTP layers is trained."""
    return not any(parameter.requires_grad for parameter in block.parameters())


# --- what every new head needs ----------------------------------------------------------------------------------------


def share_embedding(chunk: Any, depths: int) -> None:
    """Add a copy of the embedding for the heads to the last chunk, and include both copies in the embedding group.

    A tied output layer on a later stage already is a copy of the embedding. `mtp_process` then stays off, so that
    Megatron still uses it as the copy.

    Args:
        depths: number of draft tokens of the heads; Megatron keeps the copies equal if `mtp_num_layers` is set.
    """
    tied, whole = chunk.share_embeddings_and_output_weights, chunk.pg_collection.pp.size() == 1
    chunk.config.mtp_num_layers = depths
    if chunk.post_process:
        if not tied:
            with _fork_rng(), initializing(chunk.config):
                attach_embedding(chunk)
        chunk.mtp_process = chunk.pre_process or not tied
    if (whole or not tied) and (chunk.pre_process or chunk.post_process):
        chunk.setup_embeddings_and_output_layer()


def as_trunk(block: torch.nn.Module, chunk: Any) -> None:
    """Move a new head to the device of the trunk's layers, and to their data type if they all have the same."""
    like = next(chunk.decoder.parameters())
    dtypes = {parameter.dtype for parameter in chunk.decoder.parameters()}
    block.to(device=like.device, dtype=like.dtype if len(dtypes) == 1 else None)


def fill_absent(model: Any, modules: Sequence[str]) -> None:
    """Let checkpoints that lack some heads load strictly: a head without any tensor in the checkpoint is unchanged.

    A checkpoint whose drafter has a different draft vocabulary is refused.

    Args:
        model: stage of the model that holds the heads.
        modules: module names of new heads.
    """

    def fill(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in modules:
            own_N, given_N = getattr(getattr(model, name), VOCABULARY, None), state.get(f"{prefix}{name}.{VOCABULARY}")
            if own_N is not None and given_N is not None and not torch.equal(own_N.cpu(), given_N.cpu()):
                raise ValueError(
                    f"the checkpoint's {name} drafts other tokens than mtp_draft_vocab_file lists; give attach the "
                    "list that it was trained with."
                )
        absent = [name for name in modules if not any(key.startswith(f"{prefix}{name}.") for key in state)]
        if absent:
            warnings.warn(f"the checkpoint has no {', '.join(absent)}, which stay as they are.", stacklevel=2)
        for name in absent:
            state |= getattr(model, name).state_dict(prefix=f"{prefix}{name}.")

    model.register_load_state_dict_pre_hook(fill)


def tied_embedding(model: Any) -> LanguageModelEmbedding:
    """Build an embedding from the tied output weight. It is not a submodule of the model, which owns the weight."""
    with initializing(model.config, False):
        made = LanguageModelEmbedding(
            config=model.config,
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_sequence_length,
            position_embedding_type="none",
            tp_group=model.pg_collection.tp,
        )
    made.word_embeddings.weight = model.output_layer.weight
    return made


@contextmanager
def initializing(config: TransformerConfig, does: bool = True) -> Iterator[None]:
    """Enable the initialization of new weights within the context; frameworks disable it to load a checkpoint."""
    before, config.perform_initialization = config.perform_initialization, does
    try:
        yield
    finally:
        config.perform_initialization = before
