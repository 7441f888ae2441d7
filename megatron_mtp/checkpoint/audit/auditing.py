"""An audit of one side or two: open, count, read, compare; the result is plain data, for text, JSON and the page.

{"sides": [{"side": "A", "path": ..., "form": ..., "depths": ...}], "findings": [{"severity": "error", ...}],
 "compared": {"equal": 120, "pairs": 121}, "logits": {...}, "ok": false}
"""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_mtp.checkpoint.audit.comparing import Compared, compare
from megatron_mtp.checkpoint.audit.contents import contents
from megatron_mtp.checkpoint.audit.finding import NOTE, WARNING, Finding, ordered
from megatron_mtp.checkpoint.audit.folder import open_folder
from megatron_mtp.checkpoint.audit.numbers import Ranges, check_copies, copies_of
from megatron_mtp.checkpoint.audit.pairing import Pairing, pairing
from megatron_mtp.checkpoint.audit.quantization import check_scales, settings_of
from megatron_mtp.checkpoint.audit.saved import older_format, open_saved
from megatron_mtp.checkpoint.audit.settings import settings
from megatron_mtp.checkpoint.audit.side import BESIDE, DEPTH, EMBEDDING, HEAD, TRUNK, HFSide, MegatronSide, Parts, Side
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.checkpoint.hf.folder import ADAPTER, is_drafter
from megatron_mtp.checkpoint.mcore.iterations import is_checkpoint

KNOWN = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", CONFIG, ADAPTER)
"""Files that show that a folder is a model's."""


def audit(
    a: Path,
    b: Path | None = None,
    *,
    with_logits: bool = False,
    text: Path | None = None,
    trust_remote_code: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """Audit one model, or compare two.

    Args:
        a, b: Hugging Face folders or Megatron checkpoints; None to audit the first alone.
        with_logits: whether to run both sides on the same tokens.
        text: the tokens are those of this file; None for random ones.
        trust_remote_code: whether to run the Python code of a tokenizer's folder.
        quiet: whether to show no progress bar.

    Returns:
        The result in plain data, as above.

    Raises:
        ValueError: a path is no model at all, or the text cannot be tokenized.
    """
    sides = {"A": open_side(a)} | ({} if b is None else {"B": open_side(b)})
    ranges = {letter: Ranges(side) for letter, side in sides.items()}
    findings: list[Finding] = []
    compared = None
    with tqdm(total=_size(sides), unit="B", unit_scale=True, disable=quiet, desc="audit") as bar:
        if len(sides) == 2:
            compared, found = _compare(sides["A"], sides["B"], (ranges["A"], ranges["B"]), bar)
            findings += found
        alone = [_alone(side, ranges[letter], bar) for letter, side in sides.items()]
        findings += _of_sides(dict(zip(sides, alone, strict=True)))
    result: dict[str, Any] = {"sides": [facts(side, letter) for letter, side in sides.items()]}
    if compared is not None:
        result["compared"] = {"equal": compared.equal}
    if with_logits:
        from megatron_mtp.checkpoint.audit.logits import logits

        wrong, result["logits"] = logits(sides, text, trust_remote_code)
        findings += wrong
    listed = ordered(findings)
    return {**result, "findings": [asdict(one) for one in listed], "ok": not any(one.counts for one in listed)}


def open_side(path: Path) -> Side:
    """Open a folder or a checkpoint, as far as it can be read.

    Raises:
        ValueError: it is no folder, or holds nothing of a model.
    """
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise ValueError(f"{path} {what}; give the folder of a Hugging Face model or of a Megatron checkpoint.")
    if is_drafter(path):
        raise ValueError(
            f"{path} is an EAGLE-3 drafter and no model by itself; check it by megatron-mtp convert inspect {path}."
        )
    older = older_format(path)
    if older is not None:
        return older
    if is_checkpoint(path) and not (path / CONFIG).is_file():
        return open_saved(path)
    if not any(next(path.glob(pattern), None) for pattern in KNOWN):
        raise ValueError(f"{path} holds neither a config nor tensors of a model; give the folder that has them.")
    return open_folder(path)


def _size(sides: dict[str, Side]) -> int:
    return sum(entry.bytes for side in sides.values() for entry in side.tensors.values())


def _compare(a: Side, b: Side, ranges: tuple[Ranges, Ranges], bar: Any) -> tuple[Compared, list[Finding]]:
    paired = pairing(a, b)
    compared = compare(a, b, paired, ranges, bar.update)
    same = not any(one.guess in ("tied copy", "stale copy") for one in compared.findings)
    return compared, compared.findings + settings(a, b, same and _shares_head(paired)) + _states(a, b)


def _states(a: Side, b: Side) -> list[Finding]:
    """A note where two checkpoints do not have the same optimizer's tensors, by number and type; none are read."""
    if not (isinstance(a, MegatronSide) and isinstance(b, MegatronSide)) or a.optimizer == b.optimizer:
        return []
    each = " and ".join(f"{_stored(side)} on side {letter}" for letter, side in (("A", a), ("B", b)))
    says = f"The optimizer has stored {each}; its numbers are not compared."
    return [Finding("not compared", says, severity=NOTE)]


def _stored(side: MegatronSide) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in side.optimizer.get("kinds", {}).items())
    return f"{side.optimizer['tensors']} tensors ({kinds})" if side.optimizer else "nothing"


def _shares_head(paired: Pairing) -> bool:
    """Whether no head is left over that only one side has."""
    return not any(Parts(None).of(name).kind == HEAD for name in (*paired.only_a, *paired.only_b))


def _alone(side: Side, ranges: Ranges, bar: Any) -> list[Finding]:
    """What is wrong with a side by itself; what the comparison has read is not read again."""
    found = [*side.findings, *contents(side), *check_copies(side)]
    for name, entry in side.tensors.items():
        if name not in ranges.known:
            ranges.read(name)
            bar.update(entry.bytes)
    return [*found, *(check_scales(side) if isinstance(side, HFSide) else ()), *ranges.findings()]


def _of_sides(found: dict[str, list[Finding]]) -> list[Finding]:
    """The findings of each side; a warning that both sides have is no difference, and becomes a note."""
    one, other = (*found.values(), [])[:2]
    shared = [each for each in one if each.severity == WARNING and each in other]
    noted = [replace(each, severity=NOTE, says=f"On both sides: {each.says}") for each in shared]
    own = [each.of(letter) for letter, every in found.items() for each in every if each not in shared]
    return noted + own


def facts(side: Side, letter: str = "") -> dict[str, Any]:
    """What is there: trunk, depths, copies, types, quantisation."""
    parts = side.parts
    kinds: Counter[str] = Counter()
    for name, entry in side.tensors.items():
        kinds[parts.of(name).kind] += entry.bytes
    depths = parts.depths(side.tensors)
    found = {
        **({"side": letter} if letter else {}),
        "path": str(side.path),
        "form": side.form,
        **(_of_folder(side) if isinstance(side, HFSide) else _of_saved(side)),
        "layers": {"config": side.layers, "files": len(parts.trunk(side.tensors))},
        "depths": {"config": side.said_depths, "files": len(depths)},
        "tensors of each depth": [len(names) for names in depths.values()],
        "tied": side.tied,
        "copies": len(copies_of(side)),
        "tensors": len(side.tensors),
        "bytes": sum(entry.bytes for entry in side.tensors.values()),
        "bytes by part": {kind: kinds[kind] for kind in (TRUNK, DEPTH, EMBEDDING, HEAD, BESIDE) if kinds[kind]},
        "types": dict(Counter(entry.dtype for entry in side.tensors.values())),
    }
    return found


def _of_folder(side: HFSide) -> dict[str, Any]:
    return {
        "model_type": None if side.config is None else side.config.model_type,
        "family": None if side.family is None else side.family.title,
        "architectures": side.keys.get("architectures"),
        "quant_method": settings_of(side).method,
        "files": len(side.files),
        "unindexed tensors": len([name for name in side.hidden if name not in side.tensors]),
    }


def _of_saved(side: MegatronSide) -> dict[str, Any]:
    return {
        "model": "hybrid" if side.pattern is not None else "GPT",
        "iteration": side.iteration,
        **({"hybrid layer pattern": side.pattern} if side.pattern is not None else {}),
        "arguments from": side.args_from or None,
        "optimizer": side.optimizer or None,
    }
