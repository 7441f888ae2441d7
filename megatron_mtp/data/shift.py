"""The only place where tokens, labels and masks are shifted for the depths.

In: whole sequences (before any context-parallel slicing) and, where documents matter, the document of every position.
Out: the same values d positions later, for every depth d = 1 .. D at once; a shift stops at the end of its document.

Six positions, two documents [a b c] [d e f], two depths:
    values   a b c | d e f
    depth 1  b c 0 | e f 0
    depth 2  c 0 0 | f 0 0

Letters in names: D depths, B batch, S sequence.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

NO_DOCUMENT = -1
"""The document of a padding position: nothing is shifted into it or out of it."""


def shift_left(values_BS: Tensor, depths: int, document_BS: Tensor | None = None) -> Tensor:
    """Values d positions later, for d = 1 .. D; 0 where that position lies outside the document.

    Args:
        values_BS: tokens, labels or a mask, any dtype.
        depths: D, 0 or more.
        document_BS: a number for every position, equal within a document, and `NO_DOCUMENT` on padding; if None, every
            row is one document.

    Returns:
        Tensor [D, B, S] of the dtype of `values_BS`.
    """
    shifted_DBS = _windows(values_BS, depths, 0)
    return torch.where(_inside(values_BS, depths, document_BS), shifted_DBS, torch.zeros_like(shifted_DBS[:1]))


def inside_document(like_BS: Tensor, depths: int, document_BS: Tensor | None = None) -> Tensor:
    """Bool [D, B, S]: whether the position d later is in the same document."""
    return _inside(like_BS, depths, document_BS).expand(depths, *like_BS.shape)


def documents_from_eod(tokens_BS: Tensor, eod: int) -> Tensor:
    """Documents of an unpacked stream, [B, S]; the EOD token is the last of its document."""
    is_end_BS = (tokens_BS == eod).long()
    return is_end_BS.cumsum(dim=1) - is_end_BS


def documents_from_offsets(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, positions: int) -> Tensor:
    """Documents of packed (THD) rows, [B, positions]; each row has numbers of its own, so that rows can be joined.

    Args:
        cu_seqlens: [B, documents + 1], cumulative lengths without padding; the last one may be repeated.
        cu_seqlens_padded: [B, documents + 1], cumulative lengths with padding: where documents really start. None where
            the rows have no padding.
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
    """[D, B, S] view: values d positions later, `fill` beyond the end."""
    positions = values_BS.size(1)
    padded = pad(values_BS, (0, depths), value=fill)
    return padded.unfold(1, positions, 1)[:, 1:].transpose(0, 1)
