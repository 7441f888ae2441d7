"""What the tokenizer of a trained model tells its export: the rows that stand for tokens, and the special ones' ids."""

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.checkpoint.mcore.tokenizer import EMBEDDING, has_tokenizer
from megatron_mtp.data.tokenizer import entries, read_tokenizer

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Tokens:
    """The vocabulary as the tokenizer and Megatron's arguments know it.

    Attributes:
        size: ids that can occur; None where nothing tells.
        ids: `bos_token_id` and its like, where there are such tokens.
        folder: of the tokenizer; None where it is not known.
    """

    size: int | None
    ids: dict[str, int]
    folder: Path | None

    @classmethod
    def of(cls, folder: Path | None, args: Namespace, trust_remote_code: bool = False) -> "Tokens":
        """By the tokenizer in a folder, and by what the run was told of its own.

        Raises:
            ValueError: the tokenizer cannot be loaded, or not without running its own code.
        """
        said = getattr(args, "vocab_size", None)
        if folder is None or not has_tokenizer(folder):
            ends = getattr(args, "null_tokenizer_eod_id", None)
            return cls(said, {} if ends is None else {"eos_token_id": ends}, folder)
        tokenizer = read_tokenizer(folder, trust_remote_code)
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return cls(
            max(entries(tokenizer), said or 0),
            {name: value for name, value in ids.items() if value is not None},
            folder,
        )

    def vocabulary(self, reader: DistReader) -> int:
        """Rows of embedding and head in the folder: without those that Megatron adds to make their number divisible.

        Raises:
            ValueError: the tokenizer has more tokens than the checkpoint has rows.
        """
        rows = reader.shape(EMBEDDING)[0]
        if self.size is not None and self.size > rows:
            raise ValueError(
                f"the tokenizer {self.folder or ''} has {self.size} tokens, but '{EMBEDDING}' in {reader.folder} has "
                f"{rows} rows; give the tokenizer that the model was trained with (--tokenizer)."
            )
        return self.size or rows

    def generation_config(self) -> dict[str, str]:
        """The file that tells engines where a text ends, by its name; none where the tokenizer's folder has one."""
        if not self.ids or (self.folder is not None and (self.folder / GENERATION).is_file()):
            return {}
        return {GENERATION: json.dumps(self.ids, indent=2) + "\n"}
