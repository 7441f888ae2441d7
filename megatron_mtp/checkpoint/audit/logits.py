"""Logits of trunk and depths on the same tokens, and acceptance, of both sides, by the code of the proofs.

transformers runs a folder in a process of its own, Megatron runs a checkpoint; both in float32.
"""

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mtp.checkpoint.audit import WARNING, Finding
from megatron_mtp.checkpoint.audit.saved import MegatronSide, Side
from megatron_mtp.checkpoint.audit.side import HFSide
from megatron_mtp.checkpoint.mcore.iterations import run_tokenizer
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


@exact_float32()
def logits(
    sides: dict[str, Side], text: Path | None = None, trust_remote_code: bool = False
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and figures: tokens, the depths and acceptance of each side, and differences.

    Args:
        sides: one side or both, by letter.
        text: a file whose tokens both sides compute; None for random tokens.
        trust_remote_code: whether to run the Python code of a tokenizer's folder.

    Raises:
        ValueError: the text cannot be tokenized.
    """
    prompt = _prompt(list(sides.values()), text, trust_remote_code)
    computed: dict[str, dict[str, Tensor]] = {}
    findings, depths = [], dict[str, list[str]]()
    figures: dict[str, Any] = {"tokens": prompt.tokens_BS.size(1), "sides": []}
    for letter, side in sides.items():
        run = reference_logits if isinstance(side, HFSide) else megatron_logits
        try:
            found = computed[letter] = run(side.path, prompt)
        except (ValueError, RuntimeError) as error:
            says = f"No logits were computed: {str(error).splitlines()[0][:300]}"
            findings.append(Finding("logits", says, "see what the other findings say", WARNING, side=letter))
            continue
        names = depths[letter] = sorted(name for name in found if name.startswith("depth "))
        rates = tuple(round(acceptance(found, depth), 4) for depth in range(1, len(names) + 1))
        figures["sides"].append({"side": letter, "depths": len(names), "acceptance": rates})
    if len(computed) < 2:
        return findings, figures
    saved = next((letter for letter, side in sides.items() if isinstance(side, MegatronSide)), None)
    enlarged = None if saved is None else partial(rounding, sides[saved].path, prompt, computed[saved])
    a, b = computed["A"], computed["B"]
    sizes = {n: tuple(map(min, a[n].shape, b[n].shape)) for n in ("trunk", *depths["A"]) if n in b}  # without padding
    one, other = ({n: found[n][:rows, :columns] for n, (rows, columns) in sizes.items()} for found in (a, b))
    checks = compare(one, other, "side B", enlarged)
    figures["differences"] = [{"name": check.name, "figure": check.figure, "ok": check.ok} for check in checks]
    if wrong := "; ".join(f"{check.name} {check.figure:.3g}" for check in checks if not check.ok):
        findings.append(Finding("logits", f"Both sides compute differently: {wrong}.", "see the tensors that differ"))
    if len(depths["A"]) != len(depths["B"]):
        says = f"Side {min(depths, key=lambda letter: len(depths[letter]))} computes fewer depths than the other side."
        findings.append(Finding("logits", says, "see the depths that are missing"))
    return findings, figures


def _prompt(sides: list[Side], text: Path | None, trust_remote_code: bool) -> Prompt:
    folder = next((side for side in sides if isinstance(side, HFSide) and side.config is not None), None)
    saved = [side for side in sides if isinstance(side, MegatronSide)]
    if text is not None:
        runs = (run_tokenizer(side.args, side.path) for side in saved if side.args is not None)
        tokenizer = next((path for path in runs if path is not None), None) if folder is None else folder.path
        if tokenizer is None:
            says = "--text was given, but neither side has a tokenizer; give a Hugging Face folder as one side."
            raise ValueError(says)
        return Prompt.of(text_tokens(tokenizer, text, LENGTH, trust_remote_code))
    if folder is not None and folder.config is not None:
        return Prompt.of(random_tokens(folder.config, LENGTH // 16, 0)).stretched(folder.config, 0)
    reader = next((side.reader for side in saved if side.reader is not None), None)
    if reader is None:
        raise ValueError("--logits was given, but neither side can be read far enough to be run.")
    return prompt_of(reader, 0)
