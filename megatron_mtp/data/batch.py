"""Depth-shifted batches: tokens, labels and masks of every depth, created once on whole sequences.

    depth_batch(batch, D, document_BS)     Megatron's batch of whole sequences, shifted: every entry [D, B, S]
    keep_positions(batch, positions_S)     context parallelism slices Megatron's batch,
    DepthBatch.at(positions_S)             and the MTP layers' entries, which stay [D, B, S] up to the loss

Context parallelism splits every document into 2R chunks of equal length for R ranks. Rank r holds chunks r and 2R-1-r,
so that all ranks compute the same amount of causal attention. Two ranks and two documents of four positions:

    position   0 1 2 3 | 4 5 6 7
    rank       0 1 1 0 | 0 1 1 0

Letters in names: D depths, B batch, S sequence, R ranks, T positions of a packed row.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import pad

WITHOUT_SEQUENCE = {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"}
"""Entries of a batch without a sequence dimension."""


@dataclass(frozen=True)
class DepthBatch:
    """A microbatch for the MTP block and the losses.

    Attributes:
        labels_BS, loss_mask_BS: labels and loss mask of the trunk.
        tokens_DBS: t_{i+d}, the token whose embedding depth d reads at position i; None on a stage without tokens.
        labels_DBS: t_{i+d+1}, the target of depth d at position i.
        loss_mask_DBS: float; the trunk's mask, shifted.
        inside_DBS: False where the token at depth d is outside the document.
        positions_S: indices of these positions in the whole sequence, on the host, so that sizes and choices do not
            wait for a GPU.
        whole_tokens: [1 + D], float: number of unmasked tokens of the trunk and of every depth in the whole microbatch;
            the other fields may be one context-parallel rank's part of it.
        document_BS: document number in the corpus of every position, if acceptance is counted by document.
        ages_DS: how many depths before the previous one each depth takes its state from (`model/mixing.py`); None to
            always take the previous one.
        blocks_A: positions, on the host, where a block drafter's blocks begin; only these are trained on. None for all.
        block_weight: weight of each block: positions of the whole sequence divided by blocks, or 0 for the dummy block
            of a rank without one.
    """

    labels_BS: Tensor
    loss_mask_BS: Tensor
    tokens_DBS: Tensor | None
    labels_DBS: Tensor
    loss_mask_DBS: Tensor
    inside_DBS: Tensor
    positions_S: Tensor
    whole_tokens: Tensor
    document_BS: Tensor | None = None
    ages_DS: Tensor | None = None
    blocks_A: Tensor | None = None
    block_weight: float = 1.0

    def first(self, depths: int) -> "DepthBatch":
        """Return the entries of the first MTP layers."""
        return replace(
            self,
            tokens_DBS=None if self.tokens_DBS is None else self.tokens_DBS[:depths],
            labels_DBS=self.labels_DBS[:depths],
            loss_mask_DBS=self.loss_mask_DBS[:depths],
            inside_DBS=self.inside_DBS[:depths],
            whole_tokens=self.whole_tokens[: 1 + depths],
        )

    def at(self, positions_S: Tensor) -> "DepthBatch":
        """Return the part at these positions of every sequence; `whole_tokens` still counts all positions."""
        names = "labels_BS loss_mask_BS document_BS tokens_DBS labels_DBS loss_mask_DBS inside_DBS".split()
        whole = {name: value for name in names if (value := getattr(self, name)) is not None}
        index_S = to_device(positions_S, self.labels_BS.device)
        parts = {name: value.index_select(-1, index_S) for name, value in whole.items()}
        return replace(self, positions_S=self.positions_S[positions_S], **parts)

    def of_blocks(self) -> "DepthBatch":
        """Return the part where blocks begin, weighted so that sums approximate those over all positions."""
        if self.blocks_A is None:
            return self
        made = self.at(self.blocks_A)
        return replace(made, loss_mask_DBS=made.loss_mask_DBS.float() * self.block_weight, blocks_A=None)


def depth_batch(batch: dict[str, Any], depths: int, document_BS: Tensor | None = None) -> DepthBatch:
    """Create the entries of every depth from a batch of whole sequences.

    Args:
        batch: Megatron's batch; `tokens` may be None. Tokens below 0, such as image placeholders, are embedded as token
            0, and targets that depend on them are masked.
        depths: D, 0 or more.
        document_BS: see `shift_left`.
    """

    def shifted(values_BS: Tensor) -> Tensor:
        return shift_left(values_BS, depths, document_BS).contiguous()

    labels_BS, mask_BS = batch["labels"], batch["loss_mask"]
    mask_DBS, tokens_DBS = shifted(mask_BS), None
    inside_DBS = inside_document(labels_BS, depths, document_BS).contiguous()
    if batch["tokens"] is not None:
        tokens_DBS = shifted(batch["tokens"])
        are_tokens_DBS = (tokens_DBS >= 0).cumprod(0).bool()  # depth d also reads the tokens of earlier depths
        mask_DBS, inside_DBS = mask_DBS * are_tokens_DBS, inside_DBS & are_tokens_DBS
        tokens_DBS = tokens_DBS.clamp(min=0)
    return DepthBatch(
        labels_BS=labels_BS,
        loss_mask_BS=mask_BS,
        tokens_DBS=tokens_DBS,
        labels_DBS=shifted(labels_BS),
        loss_mask_DBS=mask_DBS,
        inside_DBS=inside_DBS,
        positions_S=torch.arange(labels_BS.size(1)),
        whole_tokens=torch.cat([mask_BS.float().sum().view(1), mask_DBS.float().sum((1, 2))]),
    )


def with_blocks(batch: DepthBatch, count: int, seed: tuple[int, int], positions: int) -> DepthBatch:
    """Return a rank's part of a batch with the blocks that a block drafter is trained on.

    The blocks are the same for every row and depend only on `seed`, which is (run, step): every rank draws the same
    blocks and keeps those that begin at its own positions. A rank without any gets one with weight 0.

    Args:
        count: maximum number of blocks of a whole sequence.
        positions: positions of a whole sequence.
    """
    generator = torch.Generator(device="cpu").manual_seed(hash(seed) % 2**63)
    drawn = torch.randperm(positions, generator=generator, device="cpu")[:count]
    blocks_A = torch.isin(batch.positions_S, drawn).nonzero()[:, 0]
    if not blocks_A.numel():
        return replace(batch, blocks_A=torch.zeros_like(batch.positions_S[:1]), block_weight=0.0)
    return replace(batch, blocks_A=blocks_A, block_weight=positions / drawn.numel())


def with_ages(batch: DepthBatch, seed: tuple[int, int], positions: int) -> DepthBatch:
    """Return a rank's part of a batch with the ages of the states that MTP layers continue from (`model/mixing.py`).

    Args:
        seed: (run, step).
        positions: of a whole sequence.
    """
    ages_DS = drawn_ages(len(batch.labels_DBS), seed, batch.positions_S, positions)
    return replace(batch, ages_DS=to_device(ages_DS, batch.labels_BS.device))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the host without blocking either side."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def mask_ignored_labels(batch: dict[str, Any]) -> None:
    """Turn labels below 0, such as Hugging Face's -100, into label 0 with mask 0, in place."""
    labels_BS = batch["labels"]
    ignored_BS = labels_BS < 0
    batch["labels"] = labels_BS.masked_fill(ignored_BS, 0)
    batch["loss_mask"] = batch["loss_mask"].masked_fill(ignored_BS, 0)


def join_rows(batch: dict[str, Any]) -> None:
    """Join the rows of a packed batch into one row, in place, with offsets [documents + 1] on the host."""
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if batch[name] is not None:
            lengths = batch[name].diff(dim=1).flatten()
            batch[name] = pad(lengths[lengths > 0].cumsum(0, dtype=torch.int32), (1, 0))
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        if batch[name] is not None:
            batch[name] = batch[name].view(1, -1)


def keep_positions(batch: dict[str, Any], positions_S: Tensor) -> None:
    """Keep only these positions of every sequence, in place; an attention mask keeps all its columns."""
    for name, value in batch.items():
        if value is not None and name not in WITHOUT_SEQUENCE:
            batch[name] = value.index_select(2 if name == "attention_mask" else 1, positions_S)


def positions_of_ranks(offsets: Tensor, ranks: int) -> Tensor:
    """Return the positions of every rank, [R, T / R], in the rank's order.

    Args:
        offsets: start of each document, and T, [documents + 1]; the length of a document is a multiple of 2R.
        ranks: size R of the context-parallel group.

    Raises:
        ValueError: a document cannot be split into 2R chunks of equal length.
    """
    lengths = offsets.diff()
    if (lengths % (2 * ranks)).any():
        raise ValueError(
            f"a packed batch has documents of {sorted(set(lengths.tolist()))} positions, but --context-parallel-size "
            f"{ranks} cuts each into {2 * ranks} equal chunks; pad every document to a multiple of {2 * ranks}."
        )
    position = torch.arange(int(offsets[-1]), device=offsets.device)
    document = torch.searchsorted(offsets[1:].contiguous(), position, right=True)
    chunk = (position - offsets[document]) // (lengths[document] // (2 * ranks))
    rank = torch.minimum(chunk, 2 * ranks - 1 - chunk)
    return rank.argsort(stable=True).view(ranks, -1)


# --- shifts: the only place where tokens, labels and masks are shifted ------------------------------------------------
#
# Input: whole sequences (before context-parallel slicing) and, if documents matter, the document of every position.
# Output: the same values d positions later, for all depths d = 1 .. D; a shift stops at the end of its document.
#
# Six positions, two documents [a b c] [d e f], two depths:
#     values   a b c | d e f
#     depth 1  b c 0 | e f 0
#     depth 2  c 0 0 | f 0 0

NO_DOCUMENT = -1
"""The document of a padding position; nothing is shifted into it or out of it."""


def shift_left(values_BS: Tensor, depths: int, document_BS: Tensor | None = None) -> Tensor:
    """Return values d positions later, for d = 1 .. D; 0 where that position is outside the document.

    Args:
        values_BS: tokens, labels or a mask, any dtype.
        depths: D, 0 or more.
        document_BS: document number of every position, and `NO_DOCUMENT` on padding; if None, every row is one
            document.

    Returns:
        Tensor [D, B, S] with the dtype of `values_BS`.
    """
    shifted_DBS = _windows(values_BS, depths, 0)
    return torch.where(_inside(values_BS, depths, document_BS), shifted_DBS, torch.zeros_like(shifted_DBS[:1]))


def inside_document(like_BS: Tensor, depths: int, document_BS: Tensor | None = None) -> Tensor:
    """Return a bool mask [D, B, S]: whether the position d later is in the same document."""
    return _inside(like_BS, depths, document_BS).expand(depths, *like_BS.shape)


def documents_from_eod(tokens_BS: Tensor, eod: int) -> Tensor:
    """Return the documents of an unpacked stream, [B, S]; the EOD token is the last of its document."""
    is_end_BS = (tokens_BS == eod).long()
    return is_end_BS.cumsum(dim=1) - is_end_BS


def documents_from_offsets(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, positions: int) -> Tensor:
    """Return the documents of packed (THD) rows, [B, positions]; numbers are unique across rows, so rows can be joined.

    Args:
        cu_seqlens: [B, documents + 1], cumulative lengths without padding; the last one may be repeated.
        cu_seqlens_padded: [B, documents + 1], cumulative lengths with padding, which are the actual document starts.
            None if the rows have no padding.
        positions: length of a row.
    """
    starts = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    rows, lengths = starts.size(0), cu_seqlens.diff(dim=1)
    position_BS = torch.arange(positions, device=starts.device).repeat(rows, 1)
    document_BS = torch.searchsorted(starts[:, 1:].contiguous(), position_BS, right=True)
    nearest_BS = document_BS.clamp(max=lengths.size(1) - 1)
    is_filled_BS = position_BS < starts.gather(1, nearest_BS) + lengths.gather(1, nearest_BS)
    number_BS = document_BS + positions * torch.arange(rows, device=starts.device).unsqueeze(1)
    return number_BS.masked_fill(~is_filled_BS, NO_DOCUMENT)


def _inside(like_BS: Tensor, depths: int, document_BS: Tensor | None) -> Tensor:
    if document_BS is None:
        positions = like_BS.size(1)
        position_S = torch.arange(positions, device=like_BS.device)
        depth_D = torch.arange(1, depths + 1, device=like_BS.device)
        return (position_S[None, :] + depth_D[:, None] < positions).unsqueeze(1)
    later_DBS = _windows(document_BS, depths, NO_DOCUMENT)
    return (later_DBS == document_BS) & (document_BS != NO_DOCUMENT)


def _windows(values_BS: Tensor, depths: int, fill: int) -> Tensor:
    """Return a [D, B, S] view: values d positions later, `fill` beyond the end."""
    positions = values_BS.size(1)
    padded = pad(values_BS, (0, depths), value=fill)
    return padded.unfold(1, positions, 1)[:, 1:].transpose(0, 1)


# --- later positions -------------------------------------------------------------------------------------------------


class LaterPositions:
    """Indices of the positions d = 1 .. D later, some of which are on other ranks.

    Only positions next to a split of the sequence are exchanged. `lookup` appends their values to this rank's own, and
    `where` returns row indices of the result.

    Args:
        positions_S: indices of this rank's positions in the whole sequence, on the host.
        depths: D.
        group: ranks that hold parts of the sequence.
        chosen_A: which of this rank's positions `where` refers to; None for all.
    """

    def __init__(self, positions_S: Tensor, depths: int, group: ProcessGroup, chosen_A: Tensor | None = None) -> None:
        self.positions_S, self.group, self.chosen_A = positions_S, group, chosen_A
        positions_RS = _of_all_ranks(positions_S, group)
        self.last = positions_RS.numel() - 1
        self.rank_of = torch.empty(self.last + 1, dtype=torch.long)
        self.row_of = torch.empty_like(self.rank_of)
        self.rank_of[positions_RS] = torch.arange(group.size()).unsqueeze(1)
        self.row_of[positions_RS] = torch.arange(positions_S.numel())
        first = [torch.arange(depth, self.last + 1) for depth in range(1, depths + 1)]
        crossing = [
            position[self.rank_of[position] != self.rank_of[position - depth]]
            for depth, position in enumerate(first, start=1)
        ]
        self.shared = torch.cat(crossing).unique()

    def lookup(self, values_S: Tensor) -> Tensor:
        """Return [S + exchanged positions, ...].

        Every rank of the group must call it with the values of its own positions.
        """
        if not self.shared.numel():
            return values_S
        own = self.rank_of[self.shared] == self.group.rank()
        own_rows, taken_S = (
            to_device(rows, values_S.device) for rows in (own.nonzero()[:, 0], self.row_of[self.shared[own]])
        )
        shared = values_S.new_zeros((self.shared.numel(), *values_S.shape[1:]))
        shared = shared.index_put((own_rows,), values_S[taken_S])
        return torch.cat([values_S, all_reduce(shared, group=self.group)])

    def where(self, depth: int) -> Tensor:
        """Return the row indices, [S], in the result of `lookup` that are `depth` positions later, on the host.

        At the end of the sequence it is the last position.
        """
        asked_S = self.positions_S if self.chosen_A is None else self.positions_S[self.chosen_A]
        later_S = (asked_S + depth).clamp(max=self.last)
        own_S = self.rank_of[later_S] == self.group.rank()
        return torch.where(
            own_S, self.row_of[later_S], self.positions_S.numel() + torch.searchsorted(self.shared, later_S)
        )


def _of_all_ranks(positions_S: Tensor, group: ProcessGroup) -> Tensor:
    """Return the positions of every rank, [R, S], on the host."""
    if group.size() == 1:
        return positions_S.unsqueeze(0)
    own_S = positions_S.to(torch.cuda.current_device())  # NCCL needs GPU tensors
    of_ranks = [torch.empty_like(own_S) for _ in range(group.size())]
    torch.distributed.all_gather(of_ranks, own_S, group=group)
    return torch.stack(of_ranks).cpu()


def drawn_ages(depths: int, seed: tuple[int, int], positions_S: Tensor, whole: int) -> Tensor:
    """Draw k for every depth and position, [D, S], on the host; depth 1 only has the trunk's state.

    The draws depend only on the seed, which is (run, step), and on the position, so all ranks and layouts draw the
    same.

    Args:
        positions_S: indices of these positions in the whole sequence.
        whole: number of positions of the whole sequence.
    """
    drawn = []
    for depth in range(1, depths + 1):
        generator = torch.Generator(device="cpu").manual_seed(hash((*seed, depth)) % 2**63)
        drawn.append(torch.randint(depth, (whole,), generator=generator, device="cpu"))
    return torch.stack(drawn)[:, positions_S]
