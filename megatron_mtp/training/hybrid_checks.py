"""Checks of --hybrid-layer-pattern and of what goes with it: what Megatron warns of, ignores or fails at late.

In:  the parsed arguments; those that come from a checkpoint may be None.
Out: nothing, or a ValueError with one sentence that names the flag, its value and what is allowed.
"""

from argparse import Namespace

from megatron.core.models.hybrid.hybrid_layer_allocation import ParsedHybridPattern, Symbols, parse_hybrid_pattern

from megatron_mtp.config import MTPConfig
from megatron_mtp.model.hybrid import KINDS, RECURRENT, without_stages

FLAG = "--hybrid-layer-pattern"


def set_depths(args: Namespace) -> None:
    """Count the depths of the pattern as --mtp-num-layers, as Megatron does later.

    Raises:
        ValueError: the pattern cannot be read, or --mtp-num-layers is another number.
    """
    if args.hybrid_override_pattern is not None or args.mtp_hybrid_override_pattern is not None:
        given = "hybrid" if args.hybrid_override_pattern is not None else "mtp-hybrid"
        raise ValueError(f"--{given}-override-pattern is deprecated; give {FLAG}, as '<trunk>/<depth>/...'.")
    if args.hybrid_layer_pattern is None:
        return
    depths = _read(args.hybrid_layer_pattern).mtp_num_depths
    if args.mtp_num_layers not in (None, depths):
        raise ValueError(
            f"--mtp-num-layers is {args.mtp_num_layers}, but {FLAG} {args.hybrid_layer_pattern} has {depths} depths "
            "behind its trunk, one after each '/'; give as many, or leave --mtp-num-layers out."
        )
    args.mtp_num_layers = depths or None


def _read(pattern: str) -> ParsedHybridPattern:
    trunk, *depths = pattern.split(Symbols.MTP_SEPARATOR)
    known = ", ".join(f"{symbol} ({kind})" for symbol, kind in KINDS.items())
    for part in (without_stages(trunk), *depths):
        if not part or set(part) - KINDS.keys():
            raise ValueError(
                f"{FLAG} is {pattern}, whose part '{part}' is no sequence of layers; give '<trunk>/<depth>/...' of "
                f"{known}, with | between the trunk's pipeline stages."
            )
    if len(set(depths)) > 1:
        raise ValueError(
            f"{FLAG} is {pattern}, whose depths {' and '.join(sorted(set(depths)))} differ; give all depths the same "
            "layers."
        )
    if Symbols.ATTENTION in pattern and (Symbols.MLA in pattern or Symbols.DS_ATTENTION in pattern):
        raise ValueError(
            f"{FLAG} is {pattern}, but one model has either * or latent attention (+ and D); give one kind."
        )
    return parse_hybrid_pattern(pattern)


def in_stages(pattern: str, stages: int) -> str:
    """The pattern of a checkpoint for another number of pipeline stages: without |, Megatron cuts the trunk evenly."""
    return pattern if pattern.count(Symbols.PIPE) + 1 == stages else without_stages(pattern)


def check_hybrid(args: Namespace, settings: MTPConfig) -> None:
    """Raises ValueError at the first flag that does not go with the pattern."""
    if args.hybrid_layer_pattern is None:
        return
    parsed = _read(args.hybrid_layer_pattern)
    kinds = set(args.hybrid_layer_pattern)
    _check_stages(args, parsed)
    _check_kinds(args, kinds)
    _check_heads(args, kinds)
    _check_positions(args, kinds)
    last_stage = (parsed.main_pattern or "").rpartition(Symbols.PIPE)[2]
    if settings.mtp_init == "last-layer" and not last_stage.endswith(parsed.mtp_pattern or ""):
        raise ValueError(
            f"--mtp-init is last-layer, but the last stage of the trunk in {FLAG} {args.hybrid_layer_pattern} does not "
            "end with the layers of a depth; give such a pattern, or --mtp-init random."
        )


def _check_stages(args: Namespace, parsed: ParsedHybridPattern) -> None:
    ranks = args.pipeline_model_parallel_size
    trunk = parsed.main_pattern or ""
    segments = trunk.count(Symbols.PIPE) + 1
    if segments > ranks == 1:
        raise ValueError(
            f"{FLAG} is {args.hybrid_layer_pattern}, whose trunk has {segments} stages, but there is one pipeline "
            "stage; drop the |, or give --pipeline-model-parallel-size."
        )
    if segments > 1 and segments % ranks:
        raise ValueError(
            f"{FLAG} is {args.hybrid_layer_pattern}, whose trunk has {segments} stages, but "
            f"--pipeline-model-parallel-size is {ranks}; give a multiple of it, with | between stages."
        )
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if segments == 1 and not uneven and len(trunk) % ranks:
        raise ValueError(
            f"{FLAG} is {args.hybrid_layer_pattern}, whose {len(trunk)} layers --pipeline-model-parallel-size {ranks} "
            "does not divide; put | between the stages."
        )


def _check_kinds(args: Namespace, kinds: set[str]) -> None:
    if Symbols.MOE in kinds and args.num_experts is None:
        raise ValueError(f"{FLAG} has E, but --num-experts is missing; give it, or - for an MLP.")
    if Symbols.DS_ATTENTION in kinds and args.transformer_impl == "local":
        raise ValueError(f"{FLAG} has D, whose layers need Transformer Engine, which is not here; give * or +.")
    if Symbols.GDN in kinds and not args.swiglu:
        raise ValueError(f"{FLAG} has G, whose layers take SiLU for their convolution and gate; give --swiglu.")


def _check_heads(args: Namespace, kinds: set[str]) -> None:
    """Ranks of tensor and context parallelism take the heads of recurrent layers apart."""
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    said = f"--tensor-model-parallel-size times --context-parallel-size is {ranks}"
    counts = {"linear_num_key_heads": Symbols.GDN, "linear_num_value_heads": Symbols.GDN}
    for name, kind in (counts | {"mamba_num_heads": Symbols.MAMBA}).items():
        heads = getattr(args, name)
        if kind in kinds and heads is not None and heads % ranks:
            raise ValueError(
                f"--{name.replace('_', '-')} is {heads}, which {ranks} ranks cannot share out ({said}); give a "
                "multiple of it."
            )
    if Symbols.GDN in kinds and args.linear_num_value_heads % args.linear_num_key_heads:
        raise ValueError(
            f"--linear-num-value-heads is {args.linear_num_value_heads}, which is no multiple of "
            f"--linear-num-key-heads {args.linear_num_key_heads}; give one that is."
        )
    if Symbols.MAMBA in kinds:
        _check_mamba_groups(args)


def _check_mamba_groups(args: Namespace) -> None:
    groups, heads, ranks = args.mamba_num_groups, args.mamba_num_heads, args.tensor_model_parallel_size
    if heads is None and args.hidden_size is not None:
        if 2 * args.hidden_size % args.mamba_head_dim:
            raise ValueError(
                f"--mamba-head-dim is {args.mamba_head_dim}, which does not divide twice --hidden-size "
                f"{args.hidden_size}; give one that does, or --mamba-num-heads."
            )
        heads = 2 * args.hidden_size // args.mamba_head_dim
    if groups % ranks or (heads is not None and heads % groups):
        raise ValueError(
            f"--mamba-num-groups is {groups}; give a multiple of --tensor-model-parallel-size {ranks} that divides the "
            f"{heads} heads (--mamba-num-heads, else twice --hidden-size / --mamba-head-dim)."
        )


def _check_positions(args: Namespace, kinds: set[str]) -> None:
    if args.use_rope_scaling:
        raise ValueError(f"--use-rope-scaling was given with {FLAG}, whose model does not read it; drop the flag.")
    recurrent = sorted(kinds & set(RECURRENT))
    if args.reset_attention_mask and recurrent:
        raise ValueError(
            f"--reset-attention-mask was given, but layers {' and '.join(recurrent)} of {FLAG} take states across "
            "documents of unpacked rows; give --dataloader-inter-document-masking in its place, which packs them."
        )
