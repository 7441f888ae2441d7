"""The vocabulary of a model, from its tokenizer and Megatron's arguments."""

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_mtp.data.tokenizer import GENERATION_CONFIG, entries, read_tokenizer
from megatron_mtp.megatron.checkpoint import EMBEDDING
from megatron_mtp.megatron.checkpoint.iterations import has_tokenizer
from megatron_mtp.megatron.checkpoint.reader import DistReader


@dataclass(frozen=True)
class Tokens:
    """The vocabulary, from the tokenizer and Megatron's arguments.

    Attributes:
        size: number of ids; None if neither specifies it.
        ids: the existing ones of `bos_token_id`, `eos_token_id` and `pad_token_id`.
        folder: tokenizer folder; None if unknown.
    """

    size: int | None
    ids: dict[str, int]
    folder: Path | None

    @classmethod
    def of(cls, folder: Path | None, args: Namespace, trust_remote_code: bool = False) -> "Tokens":
        """Read a folder's tokenizer, or else the training's arguments. Raise ValueError if it cannot be loaded."""
        given = getattr(args, "vocab_size", None)
        if folder is None or not has_tokenizer(folder):
            ends = getattr(args, "null_tokenizer_eod_id", None)
            return cls(given, {} if ends is None else {"eos_token_id": ends}, folder)
        tokenizer = read_tokenizer(folder, trust_remote_code)
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: value for name in names if (value := getattr(tokenizer, name)) is not None}
        return cls(max(entries(tokenizer), given or 0), ids, folder)

    def vocabulary(self, reader: DistReader) -> int:
        """Return the rows of embedding and output layer without padding. Raise ValueError if the tokenizer has more."""
        rows = reader.shape(EMBEDDING)[0]
        if self.size is not None and self.size > rows:
            raise ValueError(
                f"the tokenizer {self.folder or ''} has {self.size} tokens, but '{EMBEDDING}' in {reader.folder} has "
                f"{rows} rows; give the tokenizer that the model was trained with (--tokenizer)."
            )
        return self.size or rows

    def generation_config(self) -> dict[str, str]:
        """Return `generation_config.json` by name, so that engines know the end tokens; empty if the folder has one."""
        if not self.ids or (self.folder is not None and (self.folder / GENERATION_CONFIG).is_file()):
            return {}
        return {GENERATION_CONFIG: json.dumps(self.ids, indent=2) + "\n"}
