"""Verify that a Megatron checkpoint and a Hugging Face folder are the same model. Each check names its reference.

First, every tensor is converted both ways and compared bit by bit, and the settings of both sides are compared. That
would not find a fault in the rules, which both ways share. So Megatron runs the checkpoint, transformers runs the
folder (reference.py, in a separate process), and the logits of the trunk and of every MTP layer are compared. If
Megatron cannot run the model, the result lists a check that was not made.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_mtp.checkpoint.convert.computation import differences, settings_of
from megatron_mtp.checkpoint.convert.hf_form import kept_origin
from megatron_mtp.checkpoint.convert.import_hf import TRUNK_ONLY, flags_of
from megatron_mtp.checkpoint.convert.plan import HFModel, sides
from megatron_mtp.checkpoint.convert.rule_sides import RuleSides
from megatron_mtp.checkpoint.convert.stored import beside, check_mcore, stored_key
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.verify.prompt import Prompt, exact_float32, random_tokens
from megatron_mtp.data.tokenizer import read_tokenizer
from megatron_mtp.megatron.checkpoint import HF_FILES
from megatron_mtp.megatron.checkpoint.bits import equal_bits
from megatron_mtp.megatron.checkpoint.reader import DistReader, StoredDepths
from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.model.rope import place

TOLERANCE = 3e-5
"""Largest allowed difference of float32 logits, relative to the largest logit: the order of additions differs.

Measured: at most 5e-6 for the families of the tests, 3e-6 for SmolLM2-135M, and 1.3e-5 for latent attention with an
epsilon of 1e-5, because transformers has 1e-6 in some of its norms.
"""
ROUNDINGS, MOST_ROUNDING = 8, 1e-2
"""Some models amplify rounding: norms of recurrent layers divide by states that can be small, routers choose by them,
and single positions of SmolLM2-135M have large activations. So if logits differ by more than the tolerance, the model
also runs with the last bit of its embedding changed. Logits may differ by this many times the effect of that change,
but by no more than this fraction of the largest logit. Measured: with 38 random models of Qwen3-Next, Qwen3.5 and
Nemotron-H, Megatron and transformers differ by at most 3.9 times as much; with SmolLM2-135M by 2.0e-3 at one random
token, where the last bit changes 1.8e-3.
"""


@dataclass(frozen=True)
class Check:
    """A comparison.

    Attributes:
        name: what was compared.
        figure: the result: a number of tensors, a difference or a rate.
        ok: whether the check passed; False if it was not made.
        witness: the reference for the other side, or why the check was not made.
        made: whether the check was made.
    """

    name: str
    figure: float
    ok: bool
    witness: str
    made: bool = True

    @classmethod
    def close(cls, name: str, ours: Tensor, theirs: Tensor, witness: str, tolerance: float = TOLERANCE) -> "Check":
        """Check that the largest difference is within the tolerance, relative to the largest value or to 1."""
        difference = (ours - theirs).abs().max().item()
        ok = difference <= tolerance * max(1.0, theirs.abs().max().item())
        return cls(f"{name}, largest difference", difference, ok, witness)

    @classmethod
    def none_differs(cls, name: str, wrong: Sequence[str], witness: str) -> "Check":
        """Count the things that differ, and name the first one."""
        return cls(name, len(wrong), not wrong, "; ".join([witness, *wrong[:1]]))

    @classmethod
    def not_made(cls, what: str, reason: str) -> "Check":
        """Return a check that could not be made."""
        return cls(f"{what} not compared", 0, False, reason, made=False)


@exact_float32()
def verify(
    hf: Path, mcore: Path, text: Path | None = None, length: int = 16, seed: int = 0, trust_remote_code: bool = False
) -> list[Check]:
    """Compare a folder with a checkpoint.

    Args:
        hf: the Hugging Face folder.
        mcore: the checkpoint.
        text: a file whose tokens are the prompt; None for random tokens.
        length: number of random tokens, or of tokens of the text divided by 32; more follow at larger distances.
        seed: seed of the random tokens.
        trust_remote_code: whether to run the tokenizer folder's Python code.

    Returns:
        All checks that apply.

    Raises:
        ValueError: one of the two is damaged, or they are not of the same family.
    """
    reader = DistReader(mcore)
    model = _model_of(hf, reader)
    check_mcore(model.rules, reader)
    checks = [round_trip(model.rules, model.folder, reader), *_same_settings(model, reader)]
    if model.left_out:
        name, witness = "tensors of MTP layers that --trunk-only left out", "the record of the import"
        checks.append(Check(name, len(model.left_out), True, witness))
    if around := model.folder.tensors.keys() - {tensor.name for rule in model.rules for tensor in rule.hf}:
        checks.append(
            Check("tensors around the text model that Megatron does not save", len(around), True, "not compared")
        )
    return [*checks, *same_logits(hf, mcore, text, length, seed, trust_remote_code)]


def _model_of(hf: Path, reader: DistReader) -> HFModel:
    """Return the folder's model; only its trunk if the checkpoint was imported that way and has no MTP layers since."""
    alone = kept_origin(reader.home / HF_FILES).get(TRUNK_ONLY) is True and not StoredDepths.of(reader.keys).layers
    return beside(HFModel.read(hf, trunk_only=alone), reader)


@exact_float32()
def same_logits(
    hf: Path, mcore: Path, text: Path | None = None, length: int = 16, seed: int = 0, trust_remote_code: bool = False
) -> list[Check]:
    """Compare the logits of a folder with those of a checkpoint; arguments and errors as in `verify`."""
    reader = DistReader(mcore)
    model = _model_of(hf, reader)
    flags, reason = flags_of(model)
    if flags is None:
        return [Check.not_made("logits", f"Megatron cannot run {reason}")]
    if not _runs(reader):
        return [Check.not_made("logits", "the checkpoint was converted from a model that Megatron cannot run")]
    near_BS = (
        random_tokens(model.config, length, seed)
        if text is None
        else _text_tokens(hf, text, 32 * length, trust_remote_code)
    )
    prompt = Prompt.of(near_BS).stretched(model.config, seed)
    theirs, ours = reference_logits(hf, prompt, not model.left_out), megatron_logits(mcore, prompt)
    checks = compare(theirs, ours, rounding=partial(rounding, mcore, prompt, ours))
    if model.layout.depths and "depth 1" not in theirs:
        reason = f"nothing tells transformers how {model.family.title} stores its MTP layers (reference_forms.py)"
        checks.append(Check.not_made("logits of the MTP layers", reason))
    if text is not None:  # only the text, without the random tokens after it
        length, vocabulary = near_BS.size(1), theirs["trunk"].size(1)
        their, our = (_perplexity(one["trunk"][:length, :vocabulary], near_BS[0]) for one in (theirs, ours))
        same = abs(our - their) <= TOLERANCE * their
        checks.append(Check(f"perplexity of {length} tokens", our, same, f"transformers, {their:.6f}"))
    return checks


def _runs(reader: DistReader) -> bool:
    return not getattr(reader.common()["args"], "megatron_mtp_untrainable", False)


def _same_settings(model: HFModel, reader: DistReader) -> list[Check]:
    """Compare the folder's config with the checkpoint's arguments or kept config; skip the check if it has neither."""
    from megatron_mtp.checkpoint.verify.reference_forms import whole_config

    (flags, reason), runs = flags_of(model), _runs(reader)
    kept, witness = reader.home / HF_FILES, "the checkpoint's arguments"
    if runs and flags is None:
        wrong = [f"Megatron runs the checkpoint, but the folder has {reason}"]
    elif runs and flags is not None:
        described = parsed(flags, model.config.integer("vocab_size"))
        wrong = differences(settings_of(reader.common()["args"]), settings_of(described))
    elif (kept / CONFIG).is_file():
        wrong = differences(whole_config(kept), whole_config(model.folder.folder))
        witness = f"the {CONFIG} that the conversion kept"
    else:
        return []
    return [Check.none_differs("settings that differ", wrong, witness)]


def rounding(mcore: Path, prompt: Prompt, ours: dict[str, Tensor]) -> dict[str, float]:
    """Return, by name, how far the last bit of the embedding moves `ours`, the logits of a checkpoint."""
    moved = megatron_logits(mcore, prompt, nudged=True)
    return {name: (moved[name] - ours[name]).abs().max().item() for name in ours}


def compare(
    theirs: dict[str, Tensor],
    ours: dict[str, Tensor],
    rounding: Callable[[], dict[str, float]] | None = None,
) -> list[Check]:
    """Compare logits [S, V] of trunk and MTP layers, and the rate of accepted drafts.

    Args:
        theirs: logits by transformers, by name.
        ours: logits by Megatron, by name.
        rounding: function that returns how far the last bit of the embedding moves the logits, by name; called if they
            differ. None for no tolerance of this kind.
    """
    names = ["trunk", *sorted(name for name in theirs if name.startswith("depth "))]
    ours = {name: ours[name][: len(theirs[name]), : theirs[name].size(1)] for name in names}  # drop padding
    moved = None if rounding is None else cache(rounding)
    checks = []
    for name in names:
        check = Check.close(f"{name} logits", ours[name], theirs[name], "transformers; ours by Megatron")
        if not check.ok and moved is not None:
            most = MOST_ROUNDING * max(1.0, theirs[name].abs().max().item())
            check = replace(check, ok=check.figure <= min(ROUNDINGS * moved()[name], most))
        checks.append(check)
    if len(names) > 1:
        length = theirs["depth 1"].size(0)
        their_rate, our_rate = acceptance(theirs), acceptance(ours)
        same = abs(their_rate - our_rate) < 1.5 / length  # one near-tie may go the other way
        checks.append(Check("accepted drafts of the first depth on a prompt", our_rate, same, "transformers"))
    return checks


def acceptance(logits: dict[str, Tensor], depth: int = 1) -> float:
    """Return the acceptance: the fraction of positions where an MTP layer's most likely token is the trunk's."""
    drafts_S = logits[f"depth {depth}"].argmax(-1)
    targets_S = logits["trunk"][depth : depth + drafts_S.size(0)].argmax(-1)
    count = min(drafts_S.size(0), targets_S.size(0))
    return (drafts_S[:count] == targets_S[:count]).float().mean().item()


def round_trip(rules: list[Rule], folder: HFFolder, reader: DistReader) -> Check:
    """Convert every tensor of a folder and of a checkpoint to the other side's form, and compare bit by bit."""
    wrong = [rule for rule in rules if not _same_both_ways(rule, folder, reader)]
    count = sum(len(rule.hf) for rule in rules) - sum(len(rule.hf) for rule in wrong)
    first = "".join(f"; first that differs: {[*names, *keys][0]}" for names, keys in map(sides, wrong[:1]))
    name = "tensors that are equal bit by bit, there and back"
    return Check(name, count, not wrong, f"the folder itself{first}")


def _same_both_ways(rule: Rule, folder: HFFolder, reader: DistReader) -> bool:
    theirs = {tensor.name: folder.read(tensor.name) for tensor in rule.hf}
    ours = [reader.read(stored_key(piece, reader), piece.offset, piece.shape) for piece in rule.mcore]
    if not rule.rounds:  # compare in the dtype of the checkpoint
        cast = Options(dtype=ours[0].dtype if ours and ours[0].is_floating_point() else None)
        theirs = {name: tensor.to(cast.cast(name, tensor.dtype)) for name, tensor in theirs.items()}
    step = RuleSides(rule, theirs, ours)
    ways = (step.back,) if rule.rounds else (step.back, step.there)
    return all(_same_numbers(one, other) for way in ways for _, one, other in way())


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    wide = torch.promote_types(one.dtype, other.dtype)
    return equal_bits(one.to(wide), other.to(wide))


def _text_tokens(folder: Path, text: Path, length: int, trust_remote_code: bool) -> Tensor:
    """Return the first tokens [1, S] of a text, by a folder's tokenizer. Raise ValueError for fewer than 2."""
    tokens = read_tokenizer(folder, trust_remote_code)(text.read_text(encoding="utf-8"))["input_ids"][:length]
    if len(tokens) < 2:
        raise ValueError(f"--text: {text} makes {len(tokens)} token(s); give a longer text.")
    return torch.tensor([tokens])


def _perplexity(logits_SV: Tensor, tokens_S: Tensor) -> float:
    """Return exp of the mean cross-entropy of all tokens [S] except the first, from logits [S, V]."""
    return torch.nn.functional.cross_entropy(logits_SV[:-1].double(), tokens_S[1:]).exp().item()


def reference_logits(folder: Path, prompt: Prompt, with_depths: bool = True) -> dict[str, Tensor]:
    """Return logits of a folder by transformers, in a process without Megatron; names as in reference.py.

    Raises:
        ValueError: transformers cannot run the folder.
    """
    return all_reference_logits([folder], prompt, with_depths)[0]


def all_reference_logits(folders: list[Path], prompt: Prompt, with_depths: bool = True) -> list[dict[str, Tensor]]:
    """Run `reference_logits` for several folders in one process, because starting it takes longer than computing."""
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch) / "tokens.safetensors"
        outputs = [Path(scratch) / f"{index}.safetensors" for index in range(len(folders))]
        given = {"tokens": prompt.tokens_BS, "positions": prompt.positions_S}
        save_file(given | {"with MTP": torch.tensor(with_depths)}, tokens)
        words = [
            str(path) for folder, output in zip(folders, outputs, strict=True) for path in (folder, tokens, output)
        ]
        command = [sys.executable, "-m", "megatron_mtp.checkpoint.verify.reference", *words]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        if done.returncode:
            which = next(folder for folder, output in zip(folders, outputs, strict=True) if not output.exists())
            said = done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"]
            raise ValueError(f"transformers cannot run {which}: {said[-1].strip()[:300]}")
        return [load_file(output) for output in outputs]


def megatron_logits(folder: Path, prompt: Prompt, nudged: bool = False) -> dict[str, Tensor]:
    """Logits of a checkpoint by Megatron's modules and our MTP layers; names as in reference.py.

    Args:
        folder: the checkpoint.
        prompt: the tokens.
        nudged: whether to change the last bit of the embedding.
    """
    from megatron_mtp.checkpoint.model import load_model

    model = load_model(folder)
    place(model, prompt.positions_S.tolist())
    if nudged:
        words_VH = model.embedding.word_embeddings.weight.data
        words_VH.copy_(words_VH.nextafter(torch.tensor(torch.inf).to(words_VH)))
    with torch.no_grad():
        return logits_of(model, prompt)


def trunk_and_depths(stage: Any) -> dict[str, Tensor]:
    """Return logits of the last stage, each [S, V]."""
    states = {"trunk": stage.hidden_SBH}
    for drafted in stage.drafted:
        states |= {f"depth {depth}": state_SBH for depth, state_SBH in enumerate(drafted.hidden, start=1)}
    return {name: stage.head.project(state_SBH)[:, 0].clone().cpu() for name, state_SBH in states.items()}


def logits_of(
    model: Any, prompt: Prompt, read: Callable[[Any], dict[str, Tensor]] = trunk_and_depths
) -> dict[str, Tensor]:
    """Return the result of `read` on the last stage of a Megatron model.

    Logits of trunk and MTP layers as in reference.py.
    """
    from megatron_mtp.data.batch import depth_batch

    depths = model.config.mtp_num_layers or 0
    tokens_BS = prompt.tokens_BS.cuda()
    positions_BS = prompt.positions_S.cuda().unsqueeze(0)
    ones_BS = torch.ones_like(tokens_BS).float()
    batch: dict[str, Any] = {"tokens": tokens_BS, "labels": tokens_BS.roll(-1, 1), "loss_mask": ones_BS}
    shifted = depth_batch(batch, max(depths, 1))
    out: dict[str, Tensor] = model(
        tokens_BS, positions_BS, None, output_processor=read, output_processor_context=[shifted]
    )
    return out
