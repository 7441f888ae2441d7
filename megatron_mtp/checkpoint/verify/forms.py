"""Verify that a GPT checkpoint and a hybrid one are the same model, at the same moment of its training.

Tensors, optimizer state and everything else are compared bit by bit under the keys of the other form. Keys and settings
come from the rules of the conversion, so a fault in those would not show there. So Megatron also builds both models,
each from its own arguments, and their logits and one training step are compared.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from megatron_mtp.checkpoint.convert.computation import differences, settings_of
from megatron_mtp.checkpoint.convert.hybrid import BY_BUCKET, Halves, hybrid_arguments
from megatron_mtp.checkpoint.model import fill, model_of
from megatron_mtp.checkpoint.verify.prompt import Prompt, exact_float32
from megatron_mtp.checkpoint.verify.verify import Check, logits_of
from megatron_mtp.megatron.checkpoint.bits import equal_bits
from megatron_mtp.megatron.checkpoint.catalogue import DamagedError
from megatron_mtp.megatron.checkpoint.reader import DistReader, sharding_type, stored_draft_vocabulary
from megatron_mtp.model.arguments import check_trainable

TOLERANCE = 1e-6
"""Largest difference, relative to the largest value; on one rank in float32, none was found."""
BOTH = "Megatron's GPT and its hybrid model"
LENGTH = 16
RATE = 1e-3
NUMBERS = ("iteration", "optimizer", "opt_param_scheduler")
"""What a checkpoint stores about a run's progress besides tensors."""


@exact_float32()
def verify_forms(one: Path, other: Path, seed: int = 0) -> list[Check]:
    """Compare a GPT checkpoint with its hybrid form.

    Args:
        one, other: the checkpoints, in either order.
        seed: seed of the tokens.

    Returns:
        All checks that apply.

    Raises:
        ValueError: they have the same form, one is damaged, or a GPT has no hybrid form.
    """
    gpt, hybrid = _in_order(DistReader(one), DistReader(other))
    halves = Halves.of(_arguments(hybrid).hybrid_layer_pattern)
    tensors = _same_tensors("tensors", gpt, hybrid, gpt.keys, hybrid.keys, halves)
    states = _same_tensors("tensors of the optimizer's state", gpt, hybrid, gpt.state_keys, hybrid.state_keys, halves)
    checks = [tensors, states, *_same_beside(gpt, hybrid)]
    models = list[LanguageModule]()
    for reader in (gpt, hybrid):
        model = model_of(_arguments(reader), stored_draft_vocabulary(reader.folder))
        try:
            fill(model, reader)
        except DamagedError as error:
            return [*checks, Check.not_made("logits", str(error))]
        models.append(model)
    if sharding_type(gpt.common()) == BY_BUCKET:
        checks.append(_same_order(*models))
    of_gpt, of_hybrid = models
    prompt = prompt_of(gpt, seed)
    return [*checks, *_same_logits(of_gpt, of_hybrid, prompt), *_same_step(of_gpt, of_hybrid, prompt)]


def _arguments(reader: DistReader) -> Namespace:
    args = reader.common()["args"]
    assert isinstance(args, Namespace)
    return args


def _in_order(one: DistReader, other: DistReader) -> tuple[DistReader, DistReader]:
    """Return the GPT and the hybrid.

    Raises:
        ValueError: both are the same, or Megatron cannot run one.
    """
    for reader in (one, other):
        check_trainable(_arguments(reader), str(reader.folder))
    patterns = [getattr(_arguments(reader), "hybrid_layer_pattern", None) for reader in (one, other)]
    if (patterns[0] is None) == (patterns[1] is None):
        form = "GPT" if patterns[0] is None else "hybrid"
        raise ValueError(
            f"{one.folder} and {other.folder} are {form} checkpoints; give a GPT and a hybrid, or a Hugging Face "
            "folder and a checkpoint."
        )
    return (one, other) if patterns[0] is None else (other, one)


def _same_tensors(
    name: str, gpt: DistReader, hybrid: DistReader, keys: Iterable[str], counterparts: Iterable[str], halves: Halves
) -> Check:
    """Compare tensors bit by bit; a tensor without a counterpart differs."""
    pairs = [(key, halves.hybrid_key(key)) for key in keys]
    wrong = [key for key, counterpart in pairs if not _same_bits(gpt, key, hybrid, counterpart)]
    wrong += sorted(set(counterparts) - {counterpart for _, counterpart in pairs})
    witness = f"the other checkpoint; first that differs: {wrong[0]}" if wrong else "the other checkpoint"
    return Check(f"{name} that are equal bit by bit", len(pairs) - len(wrong), not wrong, witness)


def _same_bits(one: DistReader, key: str, other: DistReader, counterpart: str) -> bool:
    if not other.holds(counterpart) or one.shape(key) != other.shape(counterpart):
        return False
    return one.dtype(key) == other.dtype(counterpart) and all(
        equal_bits(one.read(key, offset, shape), other.read(counterpart, offset, shape))
        for offset, shape in one.slabs(key)
    )


def _same_beside(gpt: DistReader, hybrid: DistReader) -> Iterator[Check]:
    """Compare a run's progress, stored objects except kernel states, and arguments; a GPT's as those of its hybrid."""
    theirs, ours = ({name: reader.common().get(name) for name in NUMBERS} for reader in (gpt, hybrid))
    wrong = [name for name in NUMBERS if not _equal(theirs[name], ours[name])]
    yield Check.none_differs("step, optimizer's settings and learning rate that differ", wrong, "the other checkpoint")
    objects = [
        {key: reader.stored_bytes(stored) for key, stored in reader.objects.items() if "_extra_state/" not in key}
        for reader in (gpt, hybrid)
    ]
    wrong = [key for key in sorted({*objects[0], *objects[1]}) if objects[0].get(key) != objects[1].get(key)]
    yield Check.none_differs("random states and other objects that differ", wrong, "the other checkpoint")
    as_hybrid = settings_of(hybrid_arguments(_arguments(gpt), str(gpt.folder)))
    wrong = differences(as_hybrid, settings_of(_arguments(hybrid)))
    yield Check.none_differs("settings that differ", wrong, "the other checkpoint's arguments")


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal, including tensors inside them."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def prompt_of(reader: DistReader, seed: int, length: int = LENGTH) -> Prompt:
    """Return random tokens, excluding padding rows of the embedding."""
    args = _arguments(reader)
    rows = getattr(args, "vocab_size", None) or args.padded_vocab_size
    length = min(length, args.max_position_embeddings)
    return Prompt.of(torch.randint(0, rows, (1, length), generator=torch.Generator().manual_seed(seed)))


def _same_order(gpt: LanguageModule, hybrid: LanguageModule) -> Check:
    """Return whether both models order their parameters, and so the optimizer's buffers, the same way."""
    names = [  # without the layer number, which differs between the forms
        [
            ".".join(name.split(".")[-2:]).replace("final_layernorm", "final_norm")
            for name, _ in model.named_parameters()
        ]
        for model in (gpt, hybrid)
    ]
    wrong = [one for one, other in zip(*names, strict=False) if one != other]
    return Check.none_differs("parameters in another order", wrong, "both models, built by Megatron")


def _same_logits(gpt: LanguageModule, hybrid: LanguageModule, prompt: Prompt) -> Iterator[Check]:
    with torch.no_grad():
        theirs, ours = logits_of(gpt, prompt), logits_of(hybrid, prompt)
    for name, logits_SV in theirs.items():
        yield Check.close(f"{name} logits", ours[name], logits_SV, BOTH, TOLERANCE)


def _same_step(gpt: LanguageModule, hybrid: LanguageModule, prompt: Prompt) -> Iterator[Check]:
    """Compare one step of AdamW: the loss of trunk and MTP layers before and after it, and the gradients."""
    (their_losses, their_gradients), (our_losses, our_gradients) = (_step(model, prompt) for model in (gpt, hybrid))
    difference = max(abs(one - other) / abs(one) for one, other in zip(their_losses, our_losses, strict=True))
    yield Check("loss of a training step and after it, difference", difference, difference <= TOLERANCE, BOTH)
    pairs = list(zip(their_gradients, our_gradients, strict=True))
    largest = max(((one - other).abs().max() / one.abs().max().clamp(min=1e-30)).item() for one, other in pairs)
    yield Check("gradients, largest relative difference", largest, largest <= TOLERANCE, BOTH)


def _step(model: LanguageModule, prompt: Prompt) -> tuple[list[float], list[Tensor]]:
    """Return the losses before and after a step, and the gradients by parameter, in the model's order."""
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=RATE)
    loss = _loss(model, prompt)
    loss.backward()
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    optimizer.step()
    with torch.no_grad():
        return [loss.item(), _loss(model, prompt).item()], gradients


def _loss(model: LanguageModule, prompt: Prompt) -> Tensor:
    """Return the cross-entropy summed over trunk and MTP layers; a draft vocabulary takes tokens modulo its size."""
    losses = []
    for ahead, logits_SV in enumerate(logits_of(model, prompt).values(), start=1):
        targets_S = prompt.tokens_BS[0, ahead:] % logits_SV.size(1)
        losses.append(torch.nn.functional.cross_entropy(logits_SV[: len(targets_S)], targets_S))
    return torch.stack(losses).sum()
