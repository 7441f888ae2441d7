"""Models by name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION, as local folders.

huggingface_hub downloads the files to its cache, verifies them, and resumes interrupted downloads.
"""

import re
from pathlib import Path

from megatron_mtp.checkpoint.hf.config import DRAFTED

NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", DRAFTED]
"""Files to download: config, weights, tokenizer and draft vocabulary; no code, and no weights in other formats."""

REASONS = {
    "GatedRepoError": "its owner has to grant access; ask for it on the model's page, and give a token as HF_TOKEN",
    "RepositoryNotFoundError": "there is no such model; check the name, or give a token as HF_TOKEN if it is private",
    "RevisionNotFoundError": "it has no such revision; check what stands after the @",
    "LocalEntryNotFoundError": "the Hub cannot be reached, and the model is not in the cache; give a folder",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and the model is not in the cache; unset it, or give a folder",
}
"""Errors of huggingface_hub in plain words."""


def is_hub_name(name: str | Path) -> bool:
    """Return whether this is a name on the Hub rather than a local path."""
    path = Path(name)
    return NAME.fullmatch(str(name)) is not None and not path.exists() and not path.parent.exists()


def local_folder(name: str | Path) -> Path:
    """Return the folder at this path, or download the model with this name. Raise ValueError if that fails."""
    if name == "":
        raise ValueError("the model's name is empty; give a folder, or a name on the Hub.")
    if not is_hub_name(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    parts = NAME.fullmatch(str(name))
    assert parts is not None
    try:
        return Path(snapshot_download(parts["repo"], revision=parts["revision"], allow_patterns=FILES))
    except Exception as error:  # huggingface_hub and its HTTP library raise many types
        known = (REASONS.get(kind.__name__) for kind in type(error).__mro__)
        reason = next(filter(None, known), f"{' '.join(str(error).split())[:200]}; try again, or give a folder")
        raise ValueError(f"{name} could not be downloaded from the Hugging Face Hub: {reason}.") from error
