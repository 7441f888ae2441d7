"""What both sides compute on the same tokens: logits of trunk and depths, and acceptance, by the code of the proofs.

transformers runs a folder in a process of its own, Megatron runs a checkpoint; both in float32.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mtp.checkpoint.audit.finding import WARNING, Finding
from megatron_mtp.checkpoint.audit.side import HFSide, MegatronSide, Side
from megatron_mtp.checkpoint.mcore.tokenizer import run_tokenizer
from megatron_mtp.checkpoint.verify.forms import prompt_of
from megatron_mtp.checkpoint.verify.prompt import Prompt, exact_float32, random_tokens
from megatron_mtp.checkpoint.verify.verify import (
    acceptance,
    compare,
    megatron_logits,
    reference_logits,
    rounding,
    text_tokens,
)

LENGTH = 512
"""Tokens of a text that are compared."""
Logits = dict[str, Tensor]


@dataclass(frozen=True)
class Computed:
    """What one side computes.

    Attributes:
        side: "A" or "B".
        depths: number of depths whose logits there are.
        acceptance: by depth, the part of positions where its draft is the trunk's own choice.
    """

    side: str
    depths: int
    acceptance: tuple[float, ...]


def logits(sides: dict[str, Side], text: Path | None, trust_remote_code: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and figures for the page.

    Args:
        sides: one side or both, by letter.
        text: a file whose tokens both sides compute; None for random tokens.
        trust_remote_code: whether to run the Python code of a tokenizer's folder.

    Raises:
        ValueError: the text cannot be tokenized.
    """
    prompt = _prompt(list(sides.values()), text, trust_remote_code)
    computed: dict[str, Logits] = {}
    findings = []
    for letter, side in sides.items():
        try:
            computed[letter] = _of(side, prompt)
        except (ValueError, RuntimeError) as error:
            says = f"No logits were computed: {str(error).splitlines()[0][:300]}"
            findings.append(Finding("logits", says, "see what the other findings say", WARNING, side=letter))
    figures = [asdict(_figures(letter, found)) for letter, found in computed.items()]
    if len(computed) < 2:
        return findings, {"tokens": prompt.tokens_BS.size(1), "sides": figures}
    checkpoints = (letter for letter, side in sides.items() if isinstance(side, MegatronSide))
    enlarged = next((partial(_rounding, sides[letter], prompt, computed[letter]) for letter in checkpoints), None)
    differing, rows = _differences(computed["A"], computed["B"], enlarged)
    return findings + differing, {"tokens": prompt.tokens_BS.size(1), "sides": figures, "differences": rows}


def _prompt(sides: list[Side], text: Path | None, trust_remote_code: bool) -> Prompt:
    folder = next((side for side in sides if isinstance(side, HFSide) and side.config is not None), None)
    if text is not None:
        if folder is not None:
            return Prompt.of(text_tokens(folder.path, text, LENGTH, trust_remote_code))
        return Prompt.of(text_tokens(_tokenizer(sides), text, LENGTH, trust_remote_code))
    if folder is not None and folder.config is not None:
        return Prompt.of(random_tokens(folder.config, LENGTH // 16, 0)).stretched(folder.config, 0)
    readers = [side.reader for side in sides if isinstance(side, MegatronSide) and side.reader is not None]
    if not readers:
        raise ValueError("--logits was given, but neither side can be read far enough to be run.")
    return prompt_of(readers[0], 0)


def _tokenizer(sides: list[Side]) -> Path:
    for side in sides:
        if isinstance(side, MegatronSide) and side.args is not None:
            found = run_tokenizer(side.args, side.path)
            if found is not None:
                return found
    raise ValueError("--text was given, but neither side has a tokenizer; give a Hugging Face folder as one side.")


@exact_float32()
def _of(side: Side, prompt: Prompt) -> Logits:
    return reference_logits(side.path, prompt) if isinstance(side, HFSide) else megatron_logits(side.path, prompt)


@exact_float32()
def _rounding(side: Side, prompt: Prompt, ours: Logits) -> dict[str, float]:
    return rounding(side.path, prompt, ours)


def _depths(found: Logits) -> list[str]:
    return sorted(name for name in found if name.startswith("depth "))


def _figures(letter: str, found: Logits) -> Computed:
    count = len(_depths(found))
    return Computed(letter, count, tuple(round(acceptance(found, depth), 4) for depth in range(1, count + 1)))


def _differences(
    a: Logits, b: Logits, enlarged: Callable[[], dict[str, float]] | None
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Compare what both sides have."""
    names = [name for name in ("trunk", *_depths(a)) if name in b]
    sizes = {name: tuple(map(min, a[name].shape, b[name].shape)) for name in names}  # without padding of either side
    one, other = ({n: found[n][:rows, :columns] for n, (rows, columns) in sizes.items()} for found in (a, b))
    checks = compare(one, other, "side B", enlarged)
    rows = [{"name": check.name, "figure": check.figure, "ok": check.ok} for check in checks]
    wrong = [check for check in checks if not check.ok]
    findings = []
    if wrong:
        worst = "; ".join(f"{check.name} {check.figure:.3g}" for check in wrong)
        findings.append(Finding("logits", f"Both sides compute differently: {worst}.", "see the tensors that differ"))
    lacking = [
        letter for letter, found in (("A", a), ("B", b)) if len(_depths(found)) < max(map(len, map(_depths, (a, b))))
    ]
    if lacking:
        says = f"Side {lacking[0]} computes fewer depths than the other side."
        findings.append(Finding("logits", says, "see the depths that are missing"))
    return findings, rows
