"""Logits of a folder and a checkpoint on the same tokens, by the checks of `convert verify`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.audit import WARNING, Finding
from megatron_mtp.checkpoint.audit.saved import MegatronSide, Side
from megatron_mtp.checkpoint.audit.side import HFSide
from megatron_mtp.checkpoint.verify.verify import same_logits


def logits(
    sides: dict[str, Side], text: Path | None = None, trust_remote_code: bool = False
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Findings, and every check in plain data.

    Args:
        sides: by letter, a folder and a checkpoint.
        text: a file whose tokens both sides compute; None for random tokens.
        trust_remote_code: whether to run the Python code of the folder's tokenizer.

    Raises:
        ValueError: the sides are not one of each, or the text cannot be tokenized.
    """
    folder = next((side for side in sides.values() if isinstance(side, HFSide)), None)
    saved = next((side for side in sides.values() if isinstance(side, MegatronSide)), None)
    if folder is None or saved is None:
        raise ValueError("--logits compares a Hugging Face folder with a Megatron checkpoint; give one of each.")
    try:
        checks = same_logits(folder.path, saved.path, text, trust_remote_code=trust_remote_code)
    except (ValueError, RuntimeError) as error:
        says = f"No logits were computed: {str(error).splitlines()[0][:300]}"
        return [Finding("logits", says, "see what the other findings say", WARNING)], []
    wrong = "; ".join(f"{check.name} {check.figure:.3g}" for check in checks if check.made and not check.ok)
    says = f"Both sides compute differently: {wrong}."
    found = [Finding("logits", says, "see the tensors that differ")] if wrong else []
    return found, [asdict(check) for check in checks]
