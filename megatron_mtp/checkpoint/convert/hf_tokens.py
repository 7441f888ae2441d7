"""What an export takes from the tokenizer of a trained model: the size of the vocabulary, and special tokens."""

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
    """The vocabulary, from the tokenizer and Megatron's arguments.

    Attributes:
        size: number of ids that can occur; None if neither names it.
        ids: `bos_token_id`, `eos_token_id` and `pad_token_id`, those that exist.
        folder: folder of the tokenizer; None if unknown.
    """

    size: int | None
    ids: dict[str, int]
    folder: Path | None

    @classmethod
    def of(cls, folder: Path | None, args: Namespace, trust_remote_code: bool = False) -> "Tokens":
        """Read the tokenizer in a folder; without one, the training run's arguments.

        Args:
            folder: folder of the tokenizer.
            args: Megatron's arguments, from the checkpoint.
            trust_remote_code: whether to run the folder's Python code.

        Raises:
            ValueError: the tokenizer cannot be loaded, or not without its code.
        """
        given = getattr(args, "vocab_size", None)
        if folder is None or not has_tokenizer(folder):
            ends = getattr(args, "null_tokenizer_eod_id", None)
            return cls(given, {} if ends is None else {"eos_token_id": ends}, folder)
        tokenizer = read_tokenizer(folder, trust_remote_code)
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return cls(
            max(entries(tokenizer), given or 0),
            {name: value for name, value in ids.items() if value is not None},
            folder,
        )

    def vocabulary(self, reader: DistReader) -> int:
        """Number of rows of embedding and head in the folder, without the rows that Megatron adds as padding.

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
        """`generation_config.json` by its name, so that engines know where texts end; empty if the folder has one."""
        if not self.ids or (self.folder is not None and (self.folder / GENERATION).is_file()):
            return {}
        return {GENERATION: json.dumps(self.ids, indent=2) + "\n"}
