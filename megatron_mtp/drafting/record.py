"""What was drafted, accepted and emitted, step by step: a file for `megatron-mtp report`, written on request.

    {"config": {"method": "mtp", ...}, "figures": {...}, "pieces": {"12": " the", ...}, "texts": [
        {"prompt": [5, 12], "steps": [{"drafted": [7, 9], "parents": [0, 1], "accepted": 1, "emitted": [7, 8]}, ...]}]}

`drafted` are the nodes of the step's tree and `parents` the rows that they continue (row 0 is the newest token, row i
the i-th node), as in `types.Draft`. A node that was no candidate, or that lies beyond the text's end, is null.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.types import Emitted
from megatron_mtp.files import written_beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "drafts.json"


class Record:
    """Collects every step of every text; reads the drafts back to the host, which costs a little time."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.texts: list[dict[str, Any]] = [{"prompt": prompt, "steps": []} for prompt in prompts]

    def add(self, text: int, emitted: Emitted) -> None:
        """A step of a text; `text` is its number in the run, which may have several batches."""
        draft, row = emitted.draft, emitted.text
        drafted: list[int | None] = []
        parents: list[int] = []
        if draft is not None and draft.nodes:
            nodes = zip(draft.tokens_BN[row].tolist(), draft.levels()[row], strict=True)
            drafted = [token if 0 < level <= emitted.offered else None for token, level in nodes]
            parents = draft.parents()[row].tolist()
        step = {"drafted": drafted, "parents": parents, "accepted": emitted.accepted, "emitted": emitted.tokens}
        self.texts[text]["steps"].append(step)

    def write(
        self,
        folder: Path,
        config: SpeculativeConfig | None,
        figures: dict[str, Any],
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> None:
        """Write the file whole, or not at all.

        Raises:
            ValueError: the folder cannot be written.
        """
        pieces = {} if tokenizer is None else {token: tokenizer.decode([token]) for token in sorted(self._tokens())}
        settings = None if config is None else config.flat()
        whole = {"config": settings, "figures": figures, "pieces": pieces, "texts": self.texts}
        try:
            with written_beside(folder / FILE) as beside:
                beside.write_text(json.dumps(whole), encoding="utf-8")
        except OSError as error:
            raise unwritable(folder, error) from error

    def _tokens(self) -> set[int]:
        steps = [step for text in self.texts for step in text["steps"]]
        drafted = {token for step in steps for token in step["drafted"] if token is not None}
        emitted = {token for step in steps for token in step["emitted"]}
        return drafted | emitted | {token for text in self.texts for token in text["prompt"]}


def make_folder(folder: Path) -> None:
    """Make the folder before a run, whose time is then not lost on a folder that cannot be made.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> ValueError:
    """The sentence for a folder that cannot be written."""
    return ValueError(f"--record is {folder}, which cannot be written ({error.strerror}); name another folder.")
