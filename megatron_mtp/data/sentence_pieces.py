"""SentencePiece models (Kudo and Richardson 2018, arXiv:1808.06226), which three of Megatron's tokenizers use.

In:  a `tokenizer.model` without transformers' files.
Out: the subset of a transformers tokenizer that this package uses. The sentencepiece library encodes, so ids match
     training; a compiled decoder reads tokens one by one, for streams.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

MODEL = "tokenizer.model"
OF_TRANSFORMERS = ("tokenizer.json", "tokenizer_config.json")
"""Files without which transformers guesses how to split text."""
SPACE = "▁"


def model_in(path: Path) -> Path | None:
    """Return the SentencePiece model of a tokenizer's file or folder; None if transformers can read the folder."""
    if path.is_file() and path.suffix == ".model":
        return path
    is_alone = (path / MODEL).is_file() and not any((path / name).is_file() for name in OF_TRANSFORMERS)
    return path / MODEL if is_alone else None


class Encoded(dict[str, list[int]]):
    """Token ids in the form that transformers returns."""

    @property
    def input_ids(self) -> list[int]:
        """The ids."""
        return self["input_ids"]

    ids = input_ids


class SentencePieces:
    """A SentencePiece model with the interface of a transformers tokenizer.

    Attributes:
        is_fast: False, because `backend_tokenizer` decodes but does not encode.
        backend_tokenizer: decodes tokens one by one.
        name_or_path: folder of the model.
        eos_token_id, bos_token_id, pad_token_id: None if the model has no such token.

    Raises:
        ValueError: the package sentencepiece is missing, or the file is not one of its models.
    """

    is_fast = False
    chat_template = None

    def __init__(self, file: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise ValueError(f"{file} is a SentencePiece model; pip install sentencepiece to read it.") from None
        try:
            self._model = SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{file} is not a SentencePiece model ({error!s:.100}); fetch it again.") from None
        self.name_or_path = str(file.parent)
        ids = self._model.eos_id(), self._model.bos_id(), self._model.pad_id()
        self.eos_token_id, self.bos_token_id, self.pad_token_id = (None if one < 0 else one for one in ids)
        pieces = [self._model.id_to_piece(one) for one in range(len(self))]
        self._ids = {piece: one for one, piece in enumerate(pieces)}
        self.all_special_tokens = [piece for one, piece in enumerate(pieces) if self._model.is_control(one)]
        self.backend_tokenizer = self._decoder()

    def _decoder(self) -> Tokenizer:
        unknown = self._model.unk_id()
        words = {piece: one for piece, one in self._ids.items() if one != unknown}
        words[self._model.decode([unknown])] = unknown
        made = Tokenizer(models.WordLevel(words))
        made.add_special_tokens([AddedToken(piece, special=True) for piece in self.all_special_tokens])
        first = next((one for piece, one in self._ids.items() if piece.startswith(SPACE) and len(piece) > 1), None)
        strips = first is not None and not self._model.decode([first]).startswith(" ")
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
        return made

    @property
    def eos_token(self) -> str | None:
        """The token that ends documents."""
        return None if self.eos_token_id is None else self._model.id_to_piece(self.eos_token_id)

    @eos_token.setter
    def eos_token(self, token: str) -> None:
        self.eos_token_id = self._ids[token]

    def __len__(self) -> int:
        return int(self._model.get_piece_size())

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        return dict(self._ids)

    def __call__(self, text: str, **_: Any) -> Encoded:
        """Encode a text without BOS or EOS; special tokens in it are treated as text."""
        return Encoded(input_ids=self._model.encode(text))

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[Encoded]:
        """Return ids of texts, without start and end tokens."""
        return [self(text) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode tokens to text; special tokens have none."""
        return str(self._model.decode([int(one) for one in ids]))
