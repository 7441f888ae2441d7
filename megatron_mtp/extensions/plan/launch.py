"""Reads the flags that a plan needs from a Megatron-LM launch line, or from a Hugging Face folder.

The fields of `Line` are the flags that are read, with Megatron's defaults. All other flags do not affect a plan and
stay in the line, so that `train --dry-run` can check them. Megatron's own parser is not used: importing it takes longer
than the plan.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from megatron_mtp.checkpoint.families import Layout, family_of
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.spec.config import MTPConfig, flag_of


@dataclass(frozen=True)
class Line:
    """Flags of a launch line that a plan reads. Each field is the flag with its name."""

    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    kv_channels: int | None = None
    num_query_groups: int | None = None
    group_query_attention: bool = False
    seq_length: int | None = None
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    untie_embeddings_and_output_weights: bool = False
    swiglu: bool = False
    quick_geglu: bool = False
    disable_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    attention_output_gate: bool = False
    normalization: str = "LayerNorm"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    transformer_impl: str = "transformer_engine"

    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    num_experts: int | None = None
    moe_layer_freq: str = "1"
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_router_group_topk: int | None = None
    overlap_moe_expert_parallel_comm: bool = False

    hybrid_layer_pattern: str | None = None
    mamba_num_heads: int | None = None
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    mamba_num_groups: int = 8
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    pipeline_model_parallel_layout: str | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None

    micro_batch_size: int = 1
    global_batch_size: int | None = None
    recompute_activations: bool = False
    recompute_granularity: str | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    bf16: bool = False
    fp16: bool = False
    fp8_format: str | None = None
    fp8_param_gather: bool = False
    optimizer: str = "adam"
    use_distributed_optimizer: bool = False
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    main_params_dtype: str = "fp32"
    main_grads_dtype: str = "fp32"
    grad_reduce_in_bf16: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0

    mtp_num_layers: int | None = None
    mtp_use_repeated_layer: bool = False
    mtp_unroll: int | None = None
    mtp_linear_ce_main: bool = MTPConfig.mtp_linear_ce_main
    mtp_token_fraction: float = MTPConfig.mtp_token_fraction
    mtp_draft_vocab_size: int | None = MTPConfig.mtp_draft_vocab_size
    mtp_train_only: bool = MTPConfig.mtp_train_only
    mtp_loss: str = MTPConfig.mtp_loss

    @property
    def chunks(self) -> int:
        """Virtual stages per pipeline rank."""
        if self.pipeline_model_parallel_layout is not None:
            return max(1, len(stages_of(self.pipeline_model_parallel_layout)) // self.pipeline_model_parallel_size)
        if self.hybrid_layer_pattern is not None:
            return max(1, (trunk_of(self.hybrid_layer_pattern).count("|") + 1) // self.pipeline_model_parallel_size)
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        if self.num_layers_per_virtual_pipeline_stage is not None:
            extra = self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split
            a_rank = (self.whole("num_layers") + extra) / self.pipeline_model_parallel_size
            return max(1, round(a_rank / self.num_layers_per_virtual_pipeline_stage))
        return 1

    @property
    def expert_tensor(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding. Megatron pads them to a multiple of the divisor times the tensor-parallel size."""
        step = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.whole("vocab_size") // step) * step

    @property
    def depths(self) -> int:
        """Number of depths; for a repeated layer, its passes."""
        return (self.mtp_unroll if self.mtp_use_repeated_layer else None) or self.mtp_num_layers or 0

    @property
    def element(self) -> int:
        """Bytes per activation element."""
        return 2 if self.bf16 or self.fp16 else 4

    def whole(self, name: str) -> int:
        """Return a size that has no default.

        Raises:
            ValueError: no flag sets it.
        """
        value: int | None = getattr(self, name)
        if value is None:
            raise ValueError(f"{flag_of(name)} is missing; give it in the launch line, or name a folder with --model.")
        return value

    def data_parallel(self, gpus: int) -> int:
        """Return the number of data-parallel replicas on this number of GPUs.

        Raises:
            ValueError: the layout does not fit the GPUs, or experts do not fit the layout.
        """
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        apart = tensor * pipeline * self.context_parallel_size
        of_experts = self.expert_model_parallel_size * self.expert_tensor * pipeline
        for size, what in ((apart, "tensor x pipeline x context"), (of_experts, "experts x their tensor x pipeline")):
            if gpus % size:
                raise ValueError(f"--gpus is {gpus}; the line's layout ({what}) needs a multiple of {size}.")
        return gpus // apart

    def microbatches(self, gpus: int) -> int:
        """Return the number of microbatches per step and replica.

        Raises:
            ValueError: the global batch size is not divisible.
        """
        each = self.data_parallel(gpus) * self.micro_batch_size
        batch = self.global_batch_size or each
        if batch % each:
            raise ValueError(f"--global-batch-size is {batch}; give a multiple of {each} for {gpus} GPUs.")
        return batch // each


KINDS: dict[str, Any] = get_type_hints(Line)
ALIASES = {"--fp8": "fp8_format", "--recompute-method": "", "--mtp-hsm": ""}
"""Aliases of flags that are read; "" skips the value of a flag that is not read."""


def read(words: Sequence[str]) -> Line:
    """Parse a launch line. Later flags win, as with argparse.

    Raises:
        ValueError: a flag lacks its value, or has an invalid one.
    """
    found: dict[str, Any] = {}
    for flag, values in _flags(words):
        name = ALIASES.get(flag, flag.removeprefix("--").replace("-", "_"))
        if name in KINDS:
            found[name] = _value(flag, KINDS[name], values)
    line = Line(**found)
    granularity = "selective" if line.recompute_activations else line.recompute_granularity
    depths = line.mtp_num_layers or (line.hybrid_layer_pattern or "").count("/") or None
    return replace(line, recompute_granularity=granularity, mtp_num_layers=depths)


def of_arguments(line: Line, args: Namespace) -> Line:
    """Update a line with the values that Megatron's parser derived or read from a checkpoint, if their types match.

    Args:
        line: line as parsed from the words.
        args: arguments validated by Megatron.
    """
    derived = {name: getattr(args, name, None) for name, kind in KINDS.items() if get_origin(kind) is not tuple}
    found = {name: value for name, value in derived.items() if value is not None and isinstance(value, KINDS[name])}
    freq = args.moe_layer_freq
    of_other_forms = {
        "fp8_format": args.fp8,
        "disable_bias_linear": not args.add_bias_linear,
        "moe_layer_freq": "+".join(f"[{one}]" for one in freq) if isinstance(freq, list) else str(freq),
        "vocab_size": args.padded_vocab_size,
        "make_vocab_size_divisible_by": 1,
    }
    return replace(line, **found | of_other_forms)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield flags with the words that follow them."""
    flag, values = "", list[str]()
    for word in words:
        if re.match(r"--[a-z]", word):
            if flag:
                yield flag, values
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if flag:
        yield flag, values


def _value(flag: str, kind: Any, values: list[str]) -> Any:
    if kind is bool:
        return True
    if not values:
        raise ValueError(f"{flag} has no value; give one.")
    if get_origin(kind) is tuple:
        return tuple(values)
    wanted = next(one for one in get_args(kind) if one is not type(None)) if isinstance(kind, UnionType) else kind
    try:
        value = wanted(values[0])
    except ValueError:
        what = "a whole number" if wanted is int else "a number"
        raise ValueError(f"{flag} is '{values[0]:.40}'; give {what}.") from None
    if wanted is int and value < 1 and flag != "--mtp-num-layers":
        raise ValueError(f"{flag} is {value}; give 1 or more.")
    return value


def without(words: Sequence[str], *names: str) -> list[str]:
    """Remove flags and their values from the words of a line."""
    gone = {flag_of(name) for name in names}
    kept = list[str]()
    for flag, values in _flags(words):
        if flag not in gone:
            kept += [flag, *values]
    return kept


def of_folder(folder: Path) -> list[str]:
    """Return the flags of the model in a Hugging Face folder, using only its `config.json`.

    Raises:
        ValueError: Megatron cannot train a model with this config.
    """
    config = HFConfig.read(folder)
    family = family_of(config)
    if family.flags is None:
        raise ValueError(f"{folder}: Megatron cannot train {family.title} ({family.untrainable}); give another folder.")
    complete = family.complete(config)
    depths = 0
    if family.depths is not None:
        depths = family.depths.configured(complete) or family.depths.published
    return family.flags(complete, Layout(depths))


# --- values of flags -------------------------------------------------------------------------------------------------


def stages_of(layout: str) -> list[str]:
    """Split Megatron's --pipeline-model-parallel-layout into stages, each a string of letters.

    Expands repetitions as Megatron does: Et|(tt|)*2mL has the stages Et, tt, tt, mL.
    """
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    if wrong := set(text) - set("EtmL|"):
        raise ValueError(f"--pipeline-model-parallel-layout is '{layout:.60}'; '{min(wrong)}' is not one of E t m L |.")
    return text.split("|")


def trunk_of(pattern: str) -> str:
    """Return the trunk's part of a hybrid pattern, before the first slash."""
    return pattern.split("/")[0]


def inner_of(pattern: str) -> str:
    """Return the layers of an MTP layer: after the first slash, or the trunk's from its last mixing layer on."""
    trunk, *depths = pattern.split("/")
    return depths[0] if depths else re.sub(r".*(?=[*MG])", "", trunk.replace("|", ""))


def experts_by_layer(text: str, layers: int) -> list[bool]:
    """Parse --moe-layer-freq, a number or lists such as ([0]*3+[1]*58): return whether each layer has experts.

    Raises:
        ValueError: it is neither, or has a different number of layers.
    """
    plain = text.replace(" ", "")
    if plain.isdigit() and int(plain) > 0:
        return [layer % int(plain) == 0 for layer in range(layers)]
    inner = plain[1:-1] if plain.startswith("(") and plain.endswith(")") else plain
    found = list[bool]()
    for term in inner.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
        if match is None:
            raise ValueError(f"--moe-layer-freq is '{text:.60}'; give a number, or lists such as [0]*3+[1]*58.")
        found += [one == "1" for one in match[1].split(",")] * int(match[2] or 1)
    if len(found) != layers:
        raise ValueError(f"--moe-layer-freq has {len(found)} layers, and --num-layers {layers}; correct one of them.")
    return found
