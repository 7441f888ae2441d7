"""Load a checkpoint folder as a runner: the model that the checkpoint's arguments describe, on one pipeline stage.

Megatron's distributed checkpoints load under any layout, whatever layout saved them. Tensor parallelism is that of the
process group.
"""

import contextlib
import io
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_mtp.checkpoint.model import fill
from megatron_mtp.common.record import read_record
from megatron_mtp.data.tokenizer import entries, read_tokenizer
from megatron_mtp.decoding.config import PROPOSERS, SpeculativeConfig
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.checkpoint import EMBEDDING
from megatron_mtp.megatron.checkpoint.iterations import iteration_folder, repair_tracker, run_tokenizer
from megatron_mtp.megatron.checkpoint.reader import DistReader, stored_draft_vocabulary
from megatron_mtp.megatron.machine import transformer_engine_works
from megatron_mtp.model.arguments import MTPModelConfig, check_trainable, config_of
from megatron_mtp.model.build import build, join_world
from megatron_mtp.model.stored_arguments import alone, completed
from megatron_mtp.spec.head import has_both
from megatron_mtp.spec.kinds import DRAFTERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_THE_RUN = (
    "spec",
    "fp32_residual_connection",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
"""Arguments that change what a model computes and that `completed` omits, because conversions do not have them."""

OVER_ALL_RANKS = "tensor_model_parallel_size", "tensor_parallel_num_weight_shards"
OF_EXPERTS = "expert_tensor_parallel_size", "expert_tensor_parallel_num_weight_shards"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, ready to draft.

    Attributes:
        runner: the model.
        tokenizer: tokenizer folder that the model was trained or converted with; None if there are only plain ids.
    """

    runner: Runner
    tokenizer: Path | None

    def read_tokenizer(
        self, folder: Path | None = None, trust_remote_code: bool = False
    ) -> "PreTrainedTokenizerBase | None":
        """Load the tokenizer in `folder`, or else the one from training; it does not need an end token.

        Raises:
            ValueError: its size shows that its ids mean other tokens. Without the training's tokenizer, only an upper
                bound is known.
        """
        if folder is None:
            return None if self.tokenizer is None else read_tokenizer(self.tokenizer, trust_remote_code)
        tokenizer = read_tokenizer(folder, trust_remote_code)
        given, trained = entries(tokenizer), self.runner.vocab_size
        if given > trained or (self.tokenizer is not None and given != trained):
            raise ValueError(
                f"--tokenizer is {folder} with {given} entries, but the model was trained with {trained}; give the "
                "tokenizer of the training."
            )
        return tokenizer

    def line(self, folder: str) -> str:
        """Return a line that describes what was loaded from the folder."""
        runner = self.runner
        size = sum(weight.numel() for weight in runner.model.parameters())
        ranks = torch.distributed.get_world_size()
        share = "" if ranks == 1 else f" on each of {ranks} ranks"
        device = "the CPU" if cpu.installed() else torch.cuda.get_device_name()
        repeats = runner.depths > 1 and runner.model.config.mtp_use_repeated_layer
        many = f"1 MTP layer in {runner.depths} passes" if repeats else f"{runner.depths} MTP layers"
        depths = {0: "no MTP layers", 1: "1 MTP layer"}.get(runner.depths, many)
        depths = DRAFTERS[runner.kind].called if runner.kind and runner.kind in DRAFTERS else depths
        iteration, dtype = iteration_folder(Path(folder)).name, str(runner.dtype).removeprefix("torch.")
        return f"{folder}, {iteration}: {size:,} parameters{share}, {depths}, {dtype}, on {device}"


def load_drafter(config: SpeculativeConfig | None, dtype: torch.dtype | None = None) -> Runner | None:
    """Load the small model of a method that drafts with one; None for other methods."""
    folder = None if config is None else config.flat().get("model")
    if folder is None:
        return None
    return load_checkpoint(folder, dtype=dtype, flag="speculative config: model").runner


def load_runner(
    folder: str | Path,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    config: SpeculativeConfig | None = None,
) -> Runner:
    """Load the newest iteration of a checkpoint folder; arguments and errors as in `load_checkpoint`."""
    return load_checkpoint(folder, vocab_size, dtype, config=config).runner


def load_checkpoint(
    folder: str | Path,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    flag: str = "--load",
    trust_remote_code: bool = False,
    config: SpeculativeConfig | None = None,
    expert_parallel: int = 1,
) -> Loaded:
    """Build the model that the checkpoint's arguments describe, and load its weights.

    Args:
        folder: the `--save` folder of the training, or one iteration's folder in it.
        vocab_size: number of tokens that may be drafted; None for the tokenizer's, or the number the model was trained
            with.
        dtype: dtype of the weights; None for the checkpoint's.
        flag: name of the folder in messages.
        trust_remote_code: whether to run code that comes with the tokenizer.
        config: drafting method. For a checkpoint with MTP layers and a drafter, it decides which is loaded: the MTP
            layers, unless the method drafts with the drafter.
        expert_parallel: as in `join_world`, if this process has not joined a group yet.

    Raises:
        ValueError: there is no checkpoint written by Megatron, or drafting does not support the model.
    """
    repair_tracker(Path(folder))
    try:
        iteration = iteration_folder(Path(folder))
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
    join_world(expert_parallel=expert_parallel)
    reader = DistReader(iteration)
    args = reader.common().get("args")
    if not isinstance(args, Namespace):
        raise ValueError(
            f"{flag} is {folder}, which does not hold the arguments of its training; give one that Megatron saved."
        )
    check_trainable(args, f"{flag} is {iteration.parent}, which")
    takes_drafter = config is not None and PROPOSERS[config.method].depths in DRAFTERS
    is_one_of_two, args = has_both(args), alone(args, takes_drafter)
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is not None and Symbols.DS_ATTENTION in pattern:
        raise ValueError(
            f"{flag} {folder} is a hybrid model of layers {pattern}, and drafting does not support sparse attention "
            f"({Symbols.DS_ATTENTION}); draft with another model."
        )
    stored_dtype = reader.dtype(EMBEDDING)
    of_model = drafting_config(args, stored_dtype, f"{flag} {folder}")
    of_model.draft_vocabulary = stored_draft_vocabulary(iteration, of_model.mtp.drafter is not None)
    model = build(of_model)
    fill(model, reader)
    model.cuda()
    model.config.params_dtype = dtype or stored_dtype  # Mamba layers take their input's dtype from it
    for weight in model.parameters():  # buffers, such as expert biases, keep their dtype
        weight.data = weight.data.to(dtype or stored_dtype)
    tokenizer = run_tokenizer(args, iteration.parent)
    known = None if tokenizer is None or vocab_size is not None else read_tokenizer(tokenizer, trust_remote_code)
    runner = Runner(model, vocab_size if known is None else entries(known))
    runner.tokens = None if known is None else known.get_vocab()
    runner.source = iteration.parent
    runner.alarm.expected = read_record(iteration.parent, is_one_of_two and takes_drafter)
    return Loaded(runner, tokenizer)


def drafting_config(stored: Namespace, dtype: torch.dtype, name: str) -> MTPModelConfig:
    """Return the configuration of the bare model, as conversions have it, split over all ranks.

    It includes nothing of a run's layout, fusions or precision. One rank drafts without TE's modules, because
    Megatron's own can be part of a CUDA graph or have fast layers.

    Args:
        stored: arguments of the checkpoint, from a run or a conversion.
        dtype: dtype of the stored weights.
        name: name of the checkpoint in messages.

    Raises:
        ValueError: experts have biases and there are several ranks, or the number of experts does not divide by
            --expert-model-parallel-size.
    """
    ranks, spread = torch.distributed.get_world_size(), parallel_state.get_expert_model_parallel_world_size()
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints all arguments
        args = completed(stored)
    if ranks > 1 and args.num_experts and args.add_bias_linear:
        raise ValueError(f"{name} has experts with biases, which Megatron does not cut over {ranks} ranks; start one.")
    if spread > 1 and (args.num_experts or 1) % spread:
        raise ValueError(
            f"--expert-model-parallel-size is {spread}, and {name} has {args.num_experts or 'no'} experts; give a "
            "number that divides them."
        )
    vars(args).update(
        dict.fromkeys(OVER_ALL_RANKS, ranks) | dict.fromkeys(OF_EXPERTS, ranks // spread),
        expert_model_parallel_size=spread,
        params_dtype=dtype,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    vars(args).update({name: getattr(stored, name) for name in OF_THE_RUN if hasattr(stored, name)})
    if ranks > 1 and getattr(stored, "transformer_impl", "local") != "local" and transformer_engine_works():
        args.transformer_impl, args.moe_grouped_gemm = "transformer_engine", stored.moe_grouped_gemm
    return config_of(args)
