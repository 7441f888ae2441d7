"""Audit one side or two: open, count, read and compare. The result is plain data, for text and JSON.

{"sides": [{"side": "A", "path": ..., "form": ..., "depths": ...}], "findings": [{"severity": "error", ...}],
 "compared": {"equal": 120}, "logits": [...], "ok": false}
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_mtp.checkpoint.audit import NOTE, WARNING, Finding, listed, ordered
from megatron_mtp.checkpoint.audit.comparing import Pairing, check_differences, check_lacking, pairing, read_all
from megatron_mtp.checkpoint.audit.contents import contents
from megatron_mtp.checkpoint.audit.folder import open_folder
from megatron_mtp.checkpoint.audit.numbers import check_numbers
from megatron_mtp.checkpoint.audit.quantization import check_scales
from megatron_mtp.checkpoint.audit.saved import FROM_CHECKPOINT, MegatronSide, Side, open_saved
from megatron_mtp.checkpoint.audit.side import HEAD, KINDS, DrafterSide, HFSide, Parts
from megatron_mtp.checkpoint.convert import computation
from megatron_mtp.checkpoint.families import Layout
from megatron_mtp.checkpoint.families.family import UntrainableError
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.checkpoint.hf.folder import ADAPTER
from megatron_mtp.megatron.checkpoint import HF_FILES
from megatron_mtp.megatron.checkpoint.iterations import is_checkpoint

KNOWN = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", CONFIG, ADAPTER)
"""Files that identify a model's folder."""
TIE = ("tie_word_embeddings", "untie_embeddings_and_output_weights", "share_embeddings_and_output_weights")
"""Settings that do not matter if both sides compute with the same output layer."""
Run = Callable[[Path, Path], list[Any]]
"""`verify.same_logits`: computes a folder and a checkpoint, and returns its checks."""


def audit(a: Path, b: Path | None = None, *, run: Run | None = None, quiet: bool = True) -> dict[str, Any]:
    """Audit one model, or compare two.

    Args:
        a, b: Hugging Face folders or Megatron checkpoints; `b` is None to audit only one.
        run: function that computes logits of both sides, a folder and a checkpoint; None to run nothing.
        quiet: whether to hide the progress bar.

    Returns:
        The result as plain data, as above.

    Raises:
        ValueError: a path is not a model; the sides are a GPT and a hybrid, or a drafter and another model; or they
            cannot be run together.
    """
    sides = {"A": open_side(a)} | ({} if b is None else {"B": open_side(b)})
    _check_pair(*sides.values(), computes=run is not None)
    findings: list[Finding] = []
    result: dict[str, Any] = {"sides": [facts(side, letter) for letter, side in sides.items()]}
    paired = pairing(*sides.values()) if len(sides) == 2 else Pairing()
    total = sum(len(side.tensors) for side in sides.values())
    with tqdm(total=total, unit="tensor", disable=quiet, desc="audit") as bar:
        compared = read_all(list(sides.values()), paired, bar)
    if len(sides) == 2:
        one, other = sides.values()
        findings += [*check_differences(compared, one, other), *check_lacking(one, other, paired)]
        result["compared"] = {"equal": sum(found.kind is None for found in compared)}
        shares = not any(Parts(None).of(name).kind == HEAD for name in (*paired.only_a, *paired.only_b))
        shares = shares and not any(found.guess == "tied copy" for found in findings)
        findings += settings(one, other, shares)
    ties = any(side.tied for side in sides.values())
    alone = [
        [*side.findings, *contents(side), *check_numbers(side, ties), *check_scales(side)] for side in sides.values()
    ]
    shared = [found for found in alone[0] if found.severity == WARNING and all(found in own for own in alone[1:])]
    for letter, own in zip(sides, alone, strict=True):
        for found in own:  # findings on both sides are not differences
            both = len(sides) == 2 and found in shared
            noted = replace(found, severity=NOTE, says=f"On both sides: {found.says}")
            findings.append(noted if both else replace(found, side=letter))
    if run is not None:
        folder, saved = sorted(sides.values(), key=lambda side: isinstance(side, MegatronSide))
        wrong, result["logits"] = _logits(run, folder.path, saved.path)
        findings += wrong
    every = ordered(findings)
    return {**result, "findings": [asdict(one) for one in every], "ok": all(one.severity == NOTE for one in every)}


def _check_pair(*sides: Side, computes: bool) -> None:
    """Raise ValueError for a pair that another command compares."""
    drafter = next((side for side in sides if isinstance(side, DrafterSide)), None)
    if drafter is not None and computes:
        raise ValueError(
            f"--logits computes models, and {drafter.path} is a drafter; leave it out, or compare what it drafts with "
            "its checkpoint: megatron-mtp convert verify."
        )
    if computes and len({isinstance(side, HFSide) for side in sides}) < 2:
        raise ValueError("--logits compares a Hugging Face folder with a Megatron checkpoint; give one of each.")
    if drafter is not None and not all(side.has_drafter for side in sides):
        raise ValueError(
            f"{drafter.path} is a drafter, and the other side has none; whether it fits a trunk's checkpoint is told "
            "by: megatron-mtp convert attach-drafter CKPT DRAFTER OUT --dry-run"
        )
    if len({side.pattern is None for side in sides if isinstance(side, MegatronSide)}) == 2:
        one, other = (side.path for side in sides)
        raise ValueError(f"{one} and {other} are a GPT and a hybrid; compare them by: megatron-mtp convert verify")


def _logits(run: Run, folder: Path, saved: Path) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Return findings on what both sides compute, and every check as plain data."""
    try:
        checks = run(folder, saved)
    except (ValueError, RuntimeError) as error:
        says = f"No logits were computed: {str(error).splitlines()[0][:300]}"
        return [Finding("logits", says, "see the other findings", WARNING)], []
    wrong = "; ".join(f"{check.name} {check.figure:.3g}" for check in checks if check.made and not check.ok)
    says = f"Both sides compute differently: {wrong}."
    found = [Finding("logits", says, "see the tensors that differ")] if wrong else []
    return found, [asdict(check) for check in checks]


def open_side(path: Path) -> Side:
    """Open a folder or a checkpoint, as far as it can be read.

    Raises:
        ValueError: it is not a folder, or contains nothing of a model.
    """
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise ValueError(f"{path} {what}; give the folder of a Hugging Face model or of a Megatron checkpoint.")
    if is_checkpoint(path) and not (path / CONFIG).is_file():
        return open_saved(path)
    if not any(next(path.glob(pattern), None) for pattern in KNOWN):
        raise ValueError(f"{path} holds neither a config nor tensors of a model; give the folder that has them.")
    return open_folder(path)


def facts(side: Side, letter: str = "") -> dict[str, Any]:
    """Return the facts of a side: trunk, MTP layers, copies, dtypes, quantization."""
    own: dict[str, Any] = {}
    if isinstance(side, MegatronSide):
        own = {"model": "hybrid" if side.pattern else "GPT", "iteration": side.iteration}
        named = {"drafter": side.argument("drafter"), "hybrid layer pattern": side.pattern}
        own |= {name: value for name, value in named.items() if value} | {"arguments from": side.args_from or None}
    else:
        own = {"architectures": side.keys.get("architectures"), "quant_method": side.quantization.method}
        own["model_type"] = None if side.config is None else side.config.model_type or None
        own["family"] = None if side.family is None else side.family.title
        own["drafts"] = side.drafts
        if isinstance(side, DrafterSide):
            own["drafter"] = None if side.drafter is None else side.drafter.says
    parts, sizes = side.parts, Counter[str]()
    for name, entry in side.tensors.items():
        sizes[parts.of(name).kind] += entry.bytes
    return {
        **({"side": letter} if letter else {}),
        "path": str(side.path),
        "form": side.form,
        **own,
        "layers": {"config": side.layers, "files": len(side.trunk_layers)},
        "depths": {"config": side.said_depths, "files": len(side.depths)},
        "tensors of each depth": [len(names) for names in side.depths.values()],
        "tied": bool(side.tied),
        "copies": len(side.copies),
        "tensors": len(side.tensors),
        "bytes": sum(entry.bytes for entry in side.tensors.values()),
        "bytes by part": {kind: sizes[kind] for kind in KINDS if sizes[kind]},
        "types": dict(Counter(entry.dtype for entry in side.tensors.values())),
    }


# --- settings ---------------------------------------------------------------------------------------------------------


def settings(a: Side, b: Side, same_head: bool) -> list[Finding]:
    """Return a finding for every config key or argument that changes the computation and differs.

    Two configs of one `model_type`, and models that Megatron cannot run, are compared with the defaults of
    transformers' class: a key that one side sets and the other leaves at its default is equal. Everything else is
    compared as Megatron's configuration.

    Args:
        a, b: the sides.
        same_head: whether both sides compute with the same output layer; then it does not matter which of them ties it.
    """
    try:
        ours, theirs = _settings(a, b)
    except (ValueError, AttributeError) as error:  # Megatron rejects the settings of one side, or does not know them
        return [Finding("not compared", f"Settings were not compared: {str(error).rstrip('.')}.", severity=NOTE)]
    found = []
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name) and not (name in TIE and same_head):
            says = f"'{name}' is {ours.get(name)!r:.80} on side A, and {theirs.get(name)!r:.80} on side B."
            found.append(Finding("config", says, "take the value of the training", names=(name,)))
    return [*found, *_strange(a, b)]


def _strange(a: Side, b: Side) -> Iterator[Finding]:
    """Return a note on keys that transformers' class does not know and that differ between the sides."""
    from megatron_mtp.checkpoint.verify.reference_forms import unknown_keys

    if isinstance(a, HFSide) and isinstance(b, HFSide) and a.keys != b.keys:
        ours, theirs = (unknown_keys(side.path) if side.keys else {} for side in (a, b))
        if names := [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
            says = f"{listed(names)} of the config differ, which transformers' class of the model does not know."
            yield Finding("config", says, severity=NOTE, names=tuple(names))


def _settings(*sides: Side) -> list[dict[str, Any]]:
    """Return the settings of both sides in one form. Raise ValueError if no form holds both."""
    if any(isinstance(side, DrafterSide) for side in sides):
        return [_of_drafter(side) for side in sides]
    keys = [side.keys for side in sides if isinstance(side, HFSide)]
    if len(keys) == 2 and keys[0] == keys[1]:
        return [{}, {}]
    alike = len(keys) == 2 and keys[0].get("model_type") == keys[1].get("model_type")
    arguments = [None if alike else _arguments(side) for side in sides]
    if None in arguments:
        return [_whole(side) for side in sides]
    return [computation.settings_of(args) for args in arguments if args is not None]


def _of_drafter(side: Side) -> dict[str, Any]:
    if not isinstance(side, DrafterSide | MegatronSide) or side.drafter is None:
        raise ValueError("the config of a drafter cannot be used")
    return side.drafter.settings


def _whole(side: Side) -> dict[str, Any]:
    from megatron_mtp.checkpoint.verify.reference_forms import whole_config

    folder = side.path if isinstance(side, HFSide) else side.path / HF_FILES
    if not (folder / CONFIG).is_file():
        raise ValueError(f"Megatron has no configuration for the other side's model, and {folder} no {CONFIG}")
    return whole_config(folder)


def _arguments(side: Side) -> Namespace | None:
    """Return Megatron's arguments of a side; None if Megatron cannot run its model.

    Raise ValueError if none are stored.
    """
    from megatron_mtp.megatron.parsing import parsed

    if isinstance(side, MegatronSide):
        if side.args_from != FROM_CHECKPOINT:
            raise ValueError(f"{side.path} stores no arguments in Megatron's form")
        return side.args if side.runs else None
    if side.family is None or side.config is None or side.family.flags is None:
        return None
    try:
        flags = side.family.flags(side.config, side.layout(side.held_depths) or Layout(0))
    except UntrainableError:
        return None
    return parsed(flags, side.config.integer("vocab_size"))
