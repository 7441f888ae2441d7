"""Give the depths of a Megatron checkpoint a draft vocabulary; every other tensor is copied unchanged.

The head of the depths has one row for each token that they may draft, so a draft of few tokens costs little. The text
that is generated is not restricted: the trunk verifies with the whole vocabulary.
"""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_mtp.checkpoint.convert.depths import Change, Source, changed_args, copied, trunk_of
from megatron_mtp.checkpoint.mcore.stored_depths import StoredDepths
from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.data.checks import check_data_prefixes
from megatron_mtp.data.frequent_tokens import FILE, SIZE, most_frequent, tokens_of_file
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY


@dataclass(frozen=True)
class DraftTokens:
    """Which tokens the depths may draft: the most frequent ones of a corpus, or those in a file.

    Attributes:
        size: how many of the corpus.
        data_path: prefix of the corpus's .bin and .idx.
        file: a token id on every line, in place of the two others.
    """

    size: int | None = None
    data_path: str | None = None
    file: Path | None = None

    def chosen(self, vocabulary: int) -> tuple[list[int], str]:
        """Ids below `vocabulary` in ascending order, and what they are, for people.

        Raises:
            ValueError: neither size and corpus nor a file, or both; one is unreadable; fewer tokens in the vocabulary.
        """
        if self.file is not None:
            if self.size or self.data_path:
                raise ValueError(
                    f"{FILE} is {self.file}, which lists the tokens itself; leave {SIZE} and --data-path out."
                )
            return tokens_of_file(self.file, vocabulary), f"those of {self.file}"
        if self.size is None or self.data_path is None:
            raise ValueError(f"tokens are counted in text or listed in a file; give {SIZE} and --data-path, or {FILE}.")
        if self.size > vocabulary:
            raise ValueError(f"{SIZE} is {self.size}, and the model has {vocabulary} tokens; give at most that.")
        check_data_prefixes([self.data_path], vocabulary)
        tokens, share = most_frequent([self.data_path], None, self.size, vocabulary)
        return tokens, f"the most frequent, {share:.1%} of {self.data_path}"


def plan_drafts(source: Path, wanted: DraftTokens) -> tuple[Change, str]:
    """The checkpoint with this draft vocabulary in place of its own, and what its tokens are, for people.

    Raises:
        ValueError: the checkpoint has no depths, or as `DraftTokens.chosen`.
    """
    reader = DistReader(source)
    depths = StoredDepths.of(reader.keys).layers
    if not depths:
        raise ValueError(f"{source} has no MTP depths, which alone draft; attach-mtp adds some.")
    tokens, said = wanted.chosen(reader.common()["args"].padded_vocab_size)
    drafted_N = torch.tensor(tokens)
    made = [copied(reader, key) for key in reader.keys if key.startswith("mtp.") and key != DRAFT_VOCABULARY]
    made.append(Source(DRAFT_VOCABULARY, (len(tokens),), drafted_N.dtype, partial(Tensor.clone, drafted_N)))
    common = changed_args(reader, mtp_draft_vocab_size=None, mtp_draft_vocab_file=None)
    plan = {"depths": depths, "drafts": hashlib.sha256(drafted_N.numpy().tobytes()).hexdigest()}
    return Change(reader, trunk_of(reader), made, common, plan, depths, depths), f"{len(tokens)} tokens, {said}"
