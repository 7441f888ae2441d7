"""Compare the Triton kernels in Triton's interpreter with the losses' definitions; print worst differences as JSON.

TRITON_INTERPRET=1 python triton_cases.py losses faults
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from interpreted import planted
from linear_cases import SETTINGS, Case, worst
from triton.runtime.interpreter import InterpreterBuilder

from megatron_mtp.losses import linear_cross_entropy, triton_chunk, triton_kernels
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.losses.token_loss import Chunk, TokenLoss
from megatron_mtp.model.vocabulary import Vocabulary
from megatron_mtp.spec.config import MTPConfig

NAMES = [name for name, given in SETTINGS.items() if type(depth_loss(MTPConfig(**given))) in triton_chunk.KERNELS]
CASES = [
    Case(4, 2, 7, 43, 2, 0.5, 0).padded(6),
    Case(3, 1, 9, 67, 3, 1.0, 1),
    Case(2, 1, 5, 20, 2, 2.0, 3).padded(40),
]
OF_KINDS = ["ce with both", "kd tempered", "tv", "nla", "lk tempered", "e2e_tv"]
"""One loss of every class."""
EVEN_CASES = [Case(4, 2, 7, 43, 2, 0.5, 0).padded(5), CASES[2]]
"""Cases with equal rows on both ranks; the last one's second half is padding."""


def main(wanted: list[str]) -> None:
    """Run every loss with all tokens and with a draft vocabulary, or every fault."""
    triton_chunk.BLOCK = 32  # several blocks per row
    used: set[str] = set()
    linear_cross_entropy.kernels_of = lambda loss, *_: (used.add(type(loss).__name__), triton_chunk)[1]
    parts: dict[str, Callable[[], Any]] = {
        "losses": lambda: {name: differences(MTPConfig(**SETTINGS[name])) for name in NAMES},
        "a case of losses": lambda: {name: differences(MTPConfig(**SETTINGS[name]), CASES[1:2]) for name in OF_KINDS},
        "rounded": lambda: {str(dtype): rounded(dtype) for dtype in (torch.bfloat16, torch.float16)},
        "masked": masked,
        "empty": lambda: {name: empty_block(name) for name in ("ce", "tv", "nla")},
        "faults": lambda: {fault: faulty(*given) for fault, given in FAULTS.items()},
        "ranks": of_two_ranks,
        "faults of ranks": lambda: {fault: faulty_ranks(*given) for fault, given in FAULTS_OF_RANKS.items()},
        "exchanges": lambda: {name: exchanges(name) for name in OF_KINDS},
        "all exchanges": lambda: {name: exchanges(name) for name in NAMES},
        "bytes": lambda: {name: bytes_moved(name) for name in OF_KINDS},
        "all bytes": lambda: {name: bytes_moved(name) for name in NAMES},
        "used": lambda: sorted(used),
    }
    print(json.dumps({name: parts[name]() for name in wanted}))


def differences(settings: MTPConfig, cases: list[Case] = CASES) -> tuple[float, float]:
    """Return differences of the value and of the gradients."""
    pairs = []
    for case in cases:
        for drafted_K in (None, case.drafted()):
            pairs.append((case.chunked(settings, drafted_K=drafted_K), case.plain(settings, drafted_K)))
    return (
        max(worst(ours[:1], plain[:1]) for ours, plain in pairs),
        max(worst(ours[1:], plain[1:]) for ours, plain in pairs),
    )


def products(dtype: torch.dtype, **changes: Any) -> triton_chunk.Products:
    generator = torch.Generator().manual_seed(0)
    values_NV = 3 * torch.randn(5, 50, generator=generator)
    given = triton_chunk.Products(
        values_NV.to(dtype),
        torch.tensor([0, 49, 7, -100, 3]),
        torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0]),
        torch.tensor([0.25]),
        None,
        None,
        Vocabulary(50),
    )
    return replace(given, **changes)


def rounded(dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative errors of losses and gradients from half-precision products, minus those from float32."""
    loss, given = depth_loss(MTPConfig()), products(dtype)
    exact_N, exact_NV = loss(Chunk(given.products_NV.float(), given.labels_N, None, given.vocabulary))
    exact_NV *= (given.mask_N * given.scale_D).unsqueeze(1)
    losses_N = triton_chunk.losses_(loss, given)
    difference_NV = (given.products_NV.float() - exact_NV).abs()
    return worst([losses_N], [exact_N]), (difference_NV / exact_NV.abs().clamp(min=1e-3)).max().item()


def masked() -> tuple[float, float]:
    """Check that a masked position has gradient 0, whatever its products; so do all positions if the scale is 0."""
    given = products(torch.float32)
    given.products_NV[3, 5] = float("nan")
    triton_chunk.losses_(depth_loss(MTPConfig()), given)
    unscaled = products(torch.float32, scale_D=torch.tensor([0.0]))
    losses_N = triton_chunk.losses_(depth_loss(MTPConfig()), unscaled)
    assert losses_N[[0, 1, 2, 4]].all()
    return given.products_NV[3].abs().max().item(), unscaled.products_NV.abs().max().item()


def empty_block(name: str) -> float:
    """Return the worst difference if the first tokens, more than a block, have no probability."""
    loss, given = depth_loss(MTPConfig(**SETTINGS[name])), products(torch.float32)
    given.products_NV[:, :40] = float("-inf")
    labels_N = torch.tensor([45, 49, 47, 40, 43])
    teacher_NV = products(torch.float32).products_NV.flip(0).contiguous()
    teacher_NV[:, :40] = float("-inf")
    given = replace(given, labels_N=labels_N, mask_N=torch.ones(5), teacher_TW=teacher_NV, taught_N=torch.arange(5))
    chunk = Chunk(given.products_NV.clone(), labels_N, teacher_NV.clone(), given.vocabulary)
    exact_N, exact_NV = loss(chunk)
    losses_N = triton_chunk.losses_(loss, given)
    return worst([losses_N, given.products_NV], [exact_N, exact_NV * given.scale_D])


def of_two_ranks(names: list[str] = OF_KINDS, cases: list[Case] = EVEN_CASES) -> dict[str, tuple[float, float]]:
    """Return `differences` if each of two ranks has half of the vocabulary; the worse of both."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_rank, (Path(folder), names, cases), 2, start_method="fork")
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
    return {name: (max(each[name][0] for each in found), max(each[name][1] for each in found)) for name in names}


def _rank(rank: int, folder: Path, names: list[str], cases: list[Case]) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    group, found = torch.distributed.group.WORLD, {}
    for name in names:
        settings, worst_of = MTPConfig(**SETTINGS[name]), (0.0, 0.0)
        for case in cases:
            last_has_tokens = case.vocabulary > case.rows - case.rows // 2
            for drafted_K in (None, case.drafted()) if last_has_tokens else (None,):
                ours, plain = case.chunked(settings, group, drafted_K), case.plain(settings, drafted_K)
                plain[-1] = plain[-1].chunk(2)[rank]
                # For values near 0, sums of logarithms have rounding errors.
                value = abs((ours[0] - plain[0]).item()) / max(1.0, plain[0].item())
                worst_of = max(worst_of[0], value), max(worst_of[1], worst(ours[1:], plain[1:]))
        found[name] = worst_of
    torch.save(found, folder / f"{rank}.pt")


ENTRIES = 1024


def taught(name: str, vocabulary: Vocabulary) -> tuple[TokenLoss, triton_chunk.Products]:
    """Return a loss and two rows of bfloat16 products, each with a row of the trunk's."""
    values_NV, teacher_NV = torch.randn(2, 2, ENTRIES, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows_N, masks = torch.arange(2), (torch.ones(2), torch.ones(1))
    given = triton_chunk.Products(values_NV.clone(), rows_N, *masks, teacher_NV.clone(), rows_N, vocabulary)
    return depth_loss(MTPConfig(**SETTINGS[name])), given


def exchanges(name: str) -> int:
    """Return how often ranks communicate in one chunk."""
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    loss, given = taught(name, Vocabulary(ENTRIES, group))
    with (
        mock.patch("torch.distributed.all_gather_into_tensor", lambda out, own, **_: out.copy_(torch.cat([own, own]))),
        mock.patch("torch.distributed.all_reduce") as add,
        mock.patch.object(Vocabulary, "joined", autospec=True, side_effect=Vocabulary.joined) as join,
        mock.patch.object(triton_chunk, "BLOCK", ENTRIES),
    ):
        triton_chunk.losses_(loss, given)
    return join.call_count + add.call_count


def bytes_moved(name: str) -> float:
    """Return the bytes that the kernels read and write per logit, in bfloat16."""
    loss, given = taught(name, Vocabulary(ENTRIES))
    moved, load, store = 0, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted(run: Callable[..., Any], mask: int) -> Callable[..., Any]:
        def count(self: InterpreterBuilder, pointers: Any, *rest: Any) -> Any:
            nonlocal moved
            moved += int(rest[mask].data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return run(self, pointers, *rest)

        return count

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted(load, 0)),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted(store, 1)),
        mock.patch.object(triton_chunk, "BLOCK", ENTRIES),
    ):
        triton_chunk.losses_(loss, given)
    return moved / given.products_NV.numel()


FAULTS = {
    "sum": ("ce", "total * tl.exp(largest - finite) + tl.sum(tl", "total + tl.sum(tl"),
    "padding": ("ce", "tl.where(places < TOKENS, gradient, 0.0)", "gradient + 0.001"),
    "label": ("ce", "tl.where(places == label, 1 - SMOOTHING, 0.0)", "0.0"),
    "smoothing": ("ce smoothed", " - SMOOTHING / size, weight", ", weight"),
    "loss of smoothing": ("ce smoothed", "plain += tl.sum(", "plain = tl.sum("),
    "z-loss": ("ce with z-loss", "growth * q", "q"),
    "temperature": ("kd tempered", "temperature * (q - p)", "q - p"),
    "series": ("kd", "1.0 + x / divisor * series", "1.0 + x / divisor"),
    "drafted columns": ("tv", "tl.load(columns + places,", "tl.load(columns + places * 0,"),
    "overlap": ("tv", "q * short -", "q -"),
    "sum of the overlap": ("nla", "total = total * tl.exp(largest - finite) + tl.sum(parts)", "total += tl.sum(parts)"),
    "sum of the short": ("nla", "short = short * tl.exp(largest - finite) + tl", "short += tl"),
    "another row of the trunk": ("kd", "state = tl.load(taught + row)", "state = 0 * row"),
    "slope": ("tv", "gradient = slope * (q", "gradient = (q"),
    "largest of the overlap": ("nla", "tl.store(found + 4 * row, largest)", "tl.store(found + 4 * row, 0.0)"),
    "slopes of both": ("lk", "tl.load(divergence_slopes + row) * temp", "slope * temp"),
    "drafted tokens of the trunk": ("lk", "p_below = p_logits - drafted_largest", "p_below = p_logits - p_largest"),
}
"""Faults planted in kernels: the loss they break, and the text to replace."""


def faulty(name: str, old: str, new: str) -> float:
    """Return the worst difference with a kernel in which `old` is replaced by `new`."""
    with planted(triton_kernels, old, new):
        return max(differences(MTPConfig(**SETTINGS[name]), CASES[:1]))


FAULTS_OF_RANKS = {
    "the label of another rank": ("ce", triton_chunk, "masked_fill_(~is_own_N1, 0)", "add_(0)"),
    "a rank's own normalizer": ("kd", triton_chunk, "[largest_K1, total_K1], 1", "[own_K3[:, :1], own_K3[:, 1:2]], 1"),
    "a rank's own overlap": ("tv", triton_chunk, "given.vocabulary.joined(*of_slice)", "of_slice"),
    "a rank's own kd": ("kd", linear_cross_entropy, "self.vocabulary.added(sums)", "pass"),
}
"""Faults that only show with slices on several ranks: as above, with the module."""


def faulty_ranks(name: str, module: ModuleType, old: str, new: str) -> float:
    """Return the worst difference with `old` replaced by `new` in a module."""
    source = Path(str(module.__file__)).read_text()
    assert old in source, old
    with mock.patch.dict(module.__dict__):
        exec(compile(source.replace(old, new), str(module.__file__), "exec"), module.__dict__)
        triton_chunk.BLOCK, linear_cross_entropy.kernels_of = 32, lambda *_: triton_chunk
        return max(of_two_ranks([name], EVEN_CASES[:1])[name])


if __name__ == "__main__":
    main(sys.argv[1:])
