"""An audit of one side or two: open, count, read, compare; the result is plain data, for text and JSON.

{"sides": [{"side": "A", "path": ..., "form": ..., "depths": ...}], "findings": [{"severity": "error", ...}],
 "compared": {"equal": 120}, "logits": {...}, "ok": false}
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_mtp.checkpoint.audit import NOTE, WARNING, Finding, ordered
from megatron_mtp.checkpoint.audit.comparing import (
    check_copies,
    check_numbers,
    compare,
    copies_of,
    is_drafter_beside_trunk,
    pairing,
)
from megatron_mtp.checkpoint.audit.contents import contents
from megatron_mtp.checkpoint.audit.folder import open_folder
from megatron_mtp.checkpoint.audit.quantization import check_scales, settings_of
from megatron_mtp.checkpoint.audit.saved import MegatronSide, Side, older_format, open_saved
from megatron_mtp.checkpoint.audit.side import (
    DEPTH,
    DEPTH_KEYS,
    HEAD,
    KINDS,
    TRUNK,
    UNFIT,
    DrafterSide,
    HFSide,
    Parts,
)
from megatron_mtp.checkpoint.convert import computation
from megatron_mtp.checkpoint.families import Layout
from megatron_mtp.checkpoint.families.flags import UntrainableError
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.checkpoint.hf.folder import ADAPTER
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES, is_checkpoint

KNOWN = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", CONFIG, ADAPTER)
"""Files that show that a folder is a model's."""
TIE = ("tie_word_embeddings", "untie_embeddings_and_output_weights", "share_embeddings_and_output_weights")
"""Settings that do not matter where both sides compute with the same head."""
Run = Callable[[dict[str, Side]], tuple[list[Finding], dict[str, Any]]]


def audit(a: Path, b: Path | None = None, *, run: Run | None = None, quiet: bool = True) -> dict[str, Any]:
    """Audit one model, or compare two.

    Args:
        a, b: Hugging Face folders or Megatron checkpoints; None to audit the first alone.
        run: computes the sides, by letter, and returns findings and figures (`logits.logits`); None to run nothing.
        quiet: whether to show no progress bar.

    Returns:
        The result in plain data, as above.

    Raises:
        ValueError: a path is no model at all, or the sides are a GPT and a hybrid.
    """
    sides = {"A": open_side(a)} | ({} if b is None else {"B": open_side(b)})
    if run is not None and (drafter := next((one for one in sides.values() if isinstance(one, DrafterSide)), None)):
        raise ValueError(
            f"--logits computes models, and {drafter.path} is a drafter; leave it out, or compare what it drafts with "
            "its checkpoint: megatron-mtp convert verify."
        )
    if len({side.pattern is None for side in sides.values() if isinstance(side, MegatronSide)}) == 2:
        raise ValueError(f"{a} and {b} are a GPT and a hybrid; compare them by: megatron-mtp convert verify {a} {b}")
    findings: list[Finding] = []
    result: dict[str, Any] = {"sides": [facts(side, letter) for letter, side in sides.items()]}
    size = sum(entry.bytes for side in sides.values() for entry in side.tensors.values())
    with tqdm(total=size, unit="B", unit_scale=True, disable=quiet, desc="audit") as bar:
        if len(sides) == 2:
            one, other = sides.values()
            paired = pairing(one, other)
            equal, findings = compare(one, other, paired, bar.update)
            result["compared"] = {"equal": equal}
            shares = not any(Parts(None).of(name).kind == HEAD for name in (*paired.only_a, *paired.only_b))
            shares = shares and not any(found.guess == "tied copy" for found in findings)
            findings += settings(one, other, shares)
        alone = []
        for side in sides.values():
            numbers = [*check_numbers(side, bar.update), *check_copies(side)]
            scales = check_scales(side) if isinstance(side, HFSide) else ()
            alone.append([*side.findings, *contents(side), *numbers, *scales])
    shared = [found for found in alone[0] if found.severity == WARNING and all(found in own for own in alone[1:])]
    for letter, own in zip(sides, alone, strict=True):
        for found in own:  # what both sides have is no difference
            both = len(sides) == 2 and found in shared
            noted = replace(found, severity=NOTE, says=f"On both sides: {found.says}")
            findings.append(noted if both else replace(found, side=letter))
    if run is not None:
        wrong, result["logits"] = run(sides)
        findings += wrong
    listed = ordered(findings)
    return {**result, "findings": [asdict(one) for one in listed], "ok": all(one.severity == NOTE for one in listed)}


def open_side(path: Path) -> Side:
    """Open a folder or a checkpoint, as far as it can be read.

    Raises:
        ValueError: it is no folder, or holds nothing of a model.
    """
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise ValueError(f"{path} {what}; give the folder of a Hugging Face model or of a Megatron checkpoint.")
    older = older_format(path)
    if older is not None:
        return older
    if is_checkpoint(path) and not (path / CONFIG).is_file():
        return open_saved(path)
    if not any(next(path.glob(pattern), None) for pattern in KNOWN):
        raise ValueError(f"{path} holds neither a config nor tensors of a model; give the folder that has them.")
    return open_folder(path)


def facts(side: Side, letter: str = "") -> dict[str, Any]:
    """Facts of a side: trunk, depths, copies, types, quantization."""
    own: dict[str, Any]
    if isinstance(side, DrafterSide):
        own = {
            "architectures": side.keys.get("architectures"),
            "drafter": None if side.drafter is None else side.drafter.says,
        }
    elif isinstance(side, HFSide):
        own = {
            "model_type": None if side.config is None else side.config.model_type,
            "family": None if side.family is None else side.family.title,
            "architectures": side.keys.get("architectures"),
            "quant_method": settings_of(side).method,
        }
    else:
        own = {
            "model": "hybrid" if side.pattern is not None else "GPT",
            "iteration": side.iteration,
            **({"drafter": side.argument("drafter")} if side.argument("drafter") else {}),
            **({"hybrid layer pattern": side.pattern} if side.pattern is not None else {}),
            "arguments from": side.args_from or None,
        }
    parts, sizes = side.parts, Counter[str]()
    for name, entry in side.tensors.items():
        sizes[parts.of(name).kind] += entry.bytes
    depths = parts.numbered(DEPTH, side.tensors)
    return {
        **({"side": letter} if letter else {}),
        "path": str(side.path),
        "form": side.form,
        **own,
        "layers": {"config": side.layers, "files": len(parts.numbered(TRUNK, side.tensors))},
        "depths": {"config": side.said_depths, "files": len(depths)},
        "tensors of each depth": [len(names) for names in depths.values()],
        "tied": bool(side.tied),
        "copies": len(copies_of(side)),
        "tensors": len(side.tensors),
        "bytes": sum(entry.bytes for entry in side.tensors.values()),
        "bytes by part": {kind: sizes[kind] for kind in KINDS if sizes[kind]},
        "types": dict(Counter(entry.dtype for entry in side.tensors.values())),
    }


# --- settings ---------------------------------------------------------------------------------------------------------


def settings(a: Side, b: Side, same_head: bool) -> list[Finding]:
    """A finding for every config key or argument that changes the computation and differs.

    Two configs of one `model_type` are compared with the defaults of transformers' class: a key that one side writes
    out and the other leaves to its default is equal. Everything else is compared as Megatron's configuration.

    Args:
        a, b: the sides.
        same_head: whether both sides compute with the same head; then it does not matter which of them ties it.
    """
    if is_drafter_beside_trunk(a, b):
        return _unfit(*((a, b) if isinstance(a, DrafterSide) else (b, a)))
    try:
        ours, theirs = _settings(a, b)
    except (ValueError, AttributeError) as error:  # Megatron refuses the settings of one, or lacks them
        return [Finding("not compared", f"Settings were not compared: {str(error).rstrip('.')}.", severity=NOTE)]
    found = []
    for name in [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
        if name in TIE and same_head:
            continue
        says = f"'{name}' is {ours.get(name)!r:.80} on side A, and {theirs.get(name)!r:.80} on side B."
        counts = name.split(".")[-1] in DEPTH_KEYS
        advice = "put the number of depths there that the files hold" if counts else "take the value of the training"
        found.append(Finding("config", says, advice, names=(name,)))
    return found


def _unfit(drafter: Side, trunk: Side) -> list[Finding]:
    """Settings of a drafter's config that cannot be behind this trunk."""
    from megatron_mtp.checkpoint.convert.drafter_form import form_in

    try:
        args = _arguments_of(trunk) if isinstance(trunk, HFSide) else _stored_arguments(trunk)
        if args is None:
            raise UntrainableError("Megatron cannot run the trunk")
    except ValueError as error:
        return [Finding("not compared", f"Sizes were not compared: {str(error).rstrip('.')}.", severity=NOTE)]
    try:
        form_in(drafter.path, args, drafter.tensors)
    except UNFIT as error:
        return [Finding("config", f"The drafter does not fit the trunk: {error}", "give the drafter's own trunk")]
    return []


def _settings(a: Side, b: Side) -> list[dict[str, Any]]:
    """The settings of both sides in one form; raises ValueError where there is none."""
    folders = [side for side in (a, b) if isinstance(side, HFSide)]
    saved = [side for side in (a, b) if isinstance(side, MegatronSide)]
    if any(isinstance(side, DrafterSide) for side in folders):
        return [_of_drafter(side) for side in (a, b)]
    if len(folders) == 2:
        one, other = folders
        if not (one.keys and other.keys):
            raise ValueError("a config cannot be read")
        if one.keys == other.keys:
            return [{}, {}]
        alike = one.config is None or other.config is None or one.config.model_type == other.config.model_type
        if alike or None in map(_arguments_of, folders):
            return [_whole(one.path), _whole(other.path)]
    elif folders and _arguments_of(folders[0]) is None:
        if not (saved[0].path / HF_FILES / CONFIG).is_file():
            raise ValueError("Megatron has no configuration for the folder's model")
        return [_whole(side.path if isinstance(side, HFSide) else side.path / HF_FILES) for side in (a, b)]
    found = [_stored_arguments(side) if isinstance(side, MegatronSide) else _arguments_of(side) for side in (a, b)]
    return [computation.settings_of(args) for args in found if args is not None]


def _of_drafter(side: Side) -> dict[str, Any]:
    from megatron_mtp.checkpoint.convert.drafter_form import stored_form

    if isinstance(side, MegatronSide) and side.reader is not None:
        return stored_form(_stored_arguments(side), side.reader).settings
    if not isinstance(side, DrafterSide) or side.drafter is None:
        raise ValueError("the config of a drafter cannot be used")
    return side.drafter.settings


def _whole(folder: Path) -> dict[str, Any]:
    from megatron_mtp.checkpoint.verify.reference_forms import whole_config

    return {name: value for name, value in whole_config(folder).items() if not name.endswith("transformers_version")}


def _arguments_of(side: HFSide) -> Namespace | None:
    """Megatron's arguments for a folder; None if Megatron cannot run it."""
    from megatron_mtp.model.arguments import parsed

    if side.family is None or side.config is None or side.family.flags is None:
        return None
    try:
        flags = side.family.flags(side.config, side.layout(side.held_depths) or Layout(0))
    except UntrainableError:
        return None
    return parsed(flags, side.config.integer("vocab_size"))


def _stored_arguments(side: MegatronSide) -> Namespace:
    """The arguments of a checkpoint that Megatron can run; raises ValueError where there are none."""
    if side.args is None:
        raise ValueError("a checkpoint stores no arguments")
    if side.args_from != "the checkpoint":
        raise ValueError(f"the arguments of {side.path} are in {side.args_from}, in another form")
    if not side.runs:
        raise ValueError(f"Megatron cannot run the model of {side.path}")
    return side.args
