"""Compares a step of the user's own loop, saved to a folder, with the reference.

FOLDER/*.safetensors contain these tensors, in one or more files:

    weights.NAME                                        before the step, unsharded, under Megatron's names
    gradients.NAME                                      of the same weights, after the last backward, before clipping
    microbatches.I.tokens, .labels, .loss_mask          [rows, S], I from 0, of all data-parallel ranks
    microbatches.I.cu_seqlens, .cu_seqlens_padded       [documents + 1], of a packed row
    losses                                              [D], as logged

Labels may be omitted, as in reinforcement learning; they are then the next tokens, and the mask refers to tokens.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_mtp.extensions.prove.cases import Batch, Case, Layout
from megatron_mtp.extensions.prove.proving import Judge, Proof, Verdict
from megatron_mtp.extensions.prove.reference import Expected, Microbatch, Model, Weights
from megatron_mtp.extensions.prove.shrink import Tiny, read, shrink

HARMLESS = ("--hidden-dropout", "--attention-dropout", "--moe-token-dispatcher-type")
"""Flags that a saved step may have although the shrunk model does not; dropout must be 0."""

LATENT = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Megatron's default sizes of multi-latent attention."""

FUSED = (
    (r"^(module\.)+", ""),
    (r"\.transformer_layer\.", ".mtp_model_layer."),
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"self_attention\.linear_q_up_proj\.layer_norm_", "self_attention.q_layernorm."),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_", "self_attention.kv_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$", r"mlp.experts.local_experts.\2.\1.weight"),
)
"""Parameter names in Transformer Engine's fused modules, and in local ones, which the reference uses."""


def proof_of_steps(folders: Mapping[str, Path], words: Sequence[str]) -> Proof:
    """Judge saved steps.

    Args:
        folders: folders by name of the step.
        words: launch flags of the run.

    Raises:
        ValueError: a folder or tensor is missing, a shape is wrong, or the reference does not support one of the flags.
    """
    tiny = described(words)
    judge = Judge(tiny)
    verdicts = [_verdict(judge, name, folder) for name, folder in folders.items()]
    return Proof("", None, tiny, judge.with_causes(verdicts))


def _verdict(judge: Judge, step: str, folder: Path) -> Verdict:
    tiny, tensors = judge.tiny, _read(folder)
    weights, gradients = (_named(tensors, kind) for kind in ("weights", "gradients"))
    if missing := sorted(weights.keys() ^ gradients.keys()):
        raise ValueError(f"--grads {folder}: {missing[0]} needs both a weight and a gradient; write both.")
    if tiny.model["tied"]:
        for each in (weights, gradients):
            each.pop("output_layer.weight", None)
    batches = _batches(folder, tensors)
    sizes = tiny.sizes
    layout = Layout(step, sizes["tensor"], sizes["pipeline"], sizes["context"])
    case = Case(layout, _kind(batches), bool(tiny.config["calculate_per_token_loss"]), in_bf16=tiny.in_bf16)
    if "losses" in tensors and tensors["losses"].shape != (tiny.depths,):
        raise ValueError(
            f"--grads {folder}: losses does not have the shape [{tiny.depths}]; write one loss per MTP layer."
        )
    leaves = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    model = Model(leaves, tiny.config, tiny.model)
    microbatches = [Microbatch.of(batch, layout.context) for batch in batches]
    found = Expected(tensors.get("losses", torch.empty(0)).tolist(), gradients)
    return judge.of_step(case, model, microbatches, found)


def described(words: Sequence[str]) -> Tiny:
    """Return the model of a launch line in its original sizes.

    Raises:
        ValueError: the reference does not support the model.
    """
    tiny = shrink(words, keeps_sizes=True)
    given = read(words)
    for flag in ("--hidden-dropout", "--attention-dropout"):
        if float(given.get(flag, ["0.1"])[0]) != 0:
            raise ValueError(f"--grads cannot judge a step with dropout; give {flag} 0 in the run, and here.")
    left = [flag for flag in tiny.left_out if flag not in HARMLESS]
    changed = [one.split(" for ")[0].split()[0] for one in tiny.changed]
    if tiny.is_hybrid or left or changed:
        what = "the layers of a hybrid" if tiny.is_hybrid else ", ".join([*left, *changed])
        raise ValueError(f"--grads cannot judge a step with {what}, which the reference lacks; write one without.")
    sizes = {"kv_channels": tiny.config["hidden_size"] // tiny.config["num_attention_heads"], **LATENT}
    unsaid = {
        name: size for name, size in sizes.items() if name in tiny.config and f"--{name.replace('_', '-')}" not in given
    }
    if tiny.in_bf16 and "num_moe_experts" in tiny.config:
        raise ValueError(
            "--grads cannot judge experts in BF16, which routes some tokens otherwise; write a step in float32."
        )
    return replace(tiny, config=tiny.config | unsaid)


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"--grads {folder} holds no *.safetensors; give the folder that your loop has written.")
    found = dict[str, Tensor]()
    for file in files:
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read ({' '.join(str(error).split())[:120]}); write it anew.") from error
    return found


def _named(tensors: dict[str, Tensor], kind: str) -> Weights:
    found = Weights()
    for key, tensor in tensors.items():
        if key.startswith(f"{kind}."):
            name = key.removeprefix(f"{kind}.")
            for pattern, new in FUSED:
                name = re.sub(pattern, new, name)
            found[name] = tensor
    return found


def _batches(folder: Path, tensors: dict[str, Tensor]) -> list[Batch]:
    found = list[Batch]()
    while (tokens := tensors.get(f"microbatches.{len(found)}.tokens")) is not None:
        prefix = f"microbatches.{len(found)}."
        labels, mask = tensors.get(f"{prefix}labels"), tensors.get(f"{prefix}loss_mask", torch.ones(tokens.shape))
        true = tensors.get(f"{prefix}cu_seqlens")
        held = tensors.get(f"{prefix}cu_seqlens_padded", true)
        shapes = {tokens.shape, mask.shape, tokens.shape if labels is None else labels.shape}
        if len(shapes) > 1 or tokens.dim() != 2 or (true is not None and len(tokens) != 1):
            raise ValueError(
                f"--grads {folder}: tokens, labels and loss_mask of microbatch {len(found)} are not all [rows, S], "
                "one row where it is packed; write whole sequences."
            )
        bounds = (None, None) if held is None or true is None else (held.tolist(), true.tolist())
        found.append(Batch(tokens.long(), None if labels is None else labels.long(), mask.float(), *bounds))
    if not found:
        raise ValueError(
            f"--grads {folder} has no microbatches.0.tokens; write tokens, labels and loss_mask of the step."
        )
    return found


def _kind(batches: Sequence[Batch]) -> str:
    if any(batch.held is not None for batch in batches):
        return "padded" if any(batch.held != batch.true for batch in batches) else "packed"
    if any(batch.labels is None for batch in batches):
        return "unlabelled"
    return "rows" if all(bool(batch.mask.all()) for batch in batches) else "holes"
