"""Fit eh_proj of a new MTP layer by least squares, with one pass of the trunk over text.

A new MTP layer is a copy of the trunk's last layer or stack. It behaves like that layer one position later if its input
is what enters the layer there, x_{i+1}. At position i, an MTP layer has the embedding of token t_{i+1} and the trunk's
final state h_i:

    eh_proj = argmin_W  sum_i |W u_i - x_{i+1}|^2 / m_i + r |W|^2,     u_i = [enorm(embedding(t_{i+1})); hnorm(h_i)]

where m_i is the mean square of x_{i+1}: the layer normalizes its input, so only the direction matters, and a few
positions with a huge norm must not dominate. The ridge r is the best of `RIDGES` on every eighth text. Later MTP layers
read the state of the previous one, which approximates the trunk's at the next position, so they are initialized in the
same way.

Letters: S positions of a text, B batch (1), N positions of a sum, H hidden, U inputs of a fit, X its outputs.
"""

from argparse import Namespace
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import psutil
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from megatron_mtp.checkpoint.model import fill, model_of
from megatron_mtp.common.progress import progress_bar
from megatron_mtp.data.checks import check_data_prefixes, part_of
from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.checkpoint.reader import DistReader

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Candidates for the ridge, relative to the mean of the diagonal of sum_i u_i u_i^T."""
TOKENS_A_WIDTH = 64
"""Tokens to fit on per hidden unit: 32 for each unknown of a row of eh_proj."""
LENGTH = 512
"""Tokens of a text."""
FLOAT32 = 4
"""Bytes per value."""
HELD_OUT = 8
"""Every text with an index divisible by this number is used to choose the ridge."""


@dataclass(frozen=True)
class FitData:
    """A corpus: prefix of its .bin and .idx, Megatron's split (the training part is used), and the number of tokens."""

    data_path: str
    split: str = "98,2,0"
    fit_tokens: int | None = None

    def texts(self, hidden: int, seed: int) -> list[Tensor]:
        """Draw token ids [S] of texts from anywhere in documents. Raise ValueError if the corpus is too small."""
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        data = IndexedDataset(self.data_path)
        documents = part_of(len(data), self.split, "training")
        lengths = data.sequence_lengths[documents.start : documents.stop].astype(np.int64)
        ends = lengths.cumsum()
        wanted = min(self.fit_tokens or TOKENS_A_WIDTH * hidden, int(ends[-1]))
        if wanted < 2 * hidden:
            raise ValueError(
                f"the fit has {wanted} tokens of '{self.data_path}' for {2 * hidden} unknowns (twice the "
                "hidden size); give more text and --fit-tokens, or begin without a fit."
            )
        draw, texts = np.random.default_rng(seed), list[Tensor]()
        while wanted > 0:
            place = int(draw.integers(ends[-1]))
            document = int(ends.searchsorted(place, side="right"))
            start = place - int(ends[document] - lengths[document])
            length = min(LENGTH, int(lengths[document]) - start)
            tokens = data.get(documents[document], offset=start, length=length)
            texts.append(torch.from_numpy(tokens.astype(np.int64)))
            wanted -= length
        return texts


class Fit:
    """The fit of one trunk, checked before any of it runs.

    Attributes:
        texts: token ids [S] of each text.

    Args:
        reader, args: checkpoint of the trunk; Megatron's arguments of the model with MTP layers.
        layer: index of the trunk layer that an MTP layer starts as.
        data, seed: data to fit on, and the seed of the draws.

    Raises:
        ValueError: the corpus is missing, too small, or has tokens that the model lacks, or the trunk needs more memory
            than is free.
    """

    def __init__(self, reader: DistReader, args: Namespace, layer: int, data: FitData, seed: int) -> None:
        check_data_prefixes([data.data_path], args.padded_vocab_size)
        needed = FLOAT32 * sum(prod(reader.shape(key)) for key in reader.keys)
        free = psutil.virtual_memory().available if cpu.installed() else torch.cuda.mem_get_info()[0]
        if needed > free:
            raise ValueError(
                f"the fit runs the trunk in float32, which takes {needed / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB are free; give --mtp-init last-layer, which reads one layer at a time."
            )
        self.texts = data.texts(args.hidden_size, seed)
        self.args, self._reader, self._layer = args, reader, layer

    def trunk(self) -> LanguageModule:
        """Load the model with the trunk's weights. Raise ValueError if the checkpoint is damaged."""
        model = model_of(self.args)
        fill(model, self._reader, ("embedding.", "decoder.", "output_layer."))
        return model

    def projection(self, quiet: bool) -> Tensor:
        """Return eh_proj [H, 2H] in float32; `quiet` hides the progress bar.

        Raise ValueError if the checkpoint is damaged.
        """
        model = self.trunk()
        hidden = self.args.hidden_size
        fitted, held_out = (Moments.zero(2 * hidden, hidden) for _ in range(2))
        total = sum(map(len, self.texts))
        with progress_bar(desc="fit", total=total, unit="token", unit_scale=True, leave=False, disable=quiet) as bar:
            for number, tokens_S in enumerate(self.texts, 1):
                (fitted if number % HELD_OUT else held_out).add_(moments(model, self._layer, tokens_S))
                bar.update(len(tokens_S))
        best = min(RIDGES, key=lambda ridge: held_out.error(fitted.solved(ridge)))
        fitted.add_(held_out)
        return fitted.solved(best).float().cpu()


@dataclass(frozen=True)
class Moments:
    """Sums over positions, in float64, with u and x divided by the root mean square of x.

    Attributes:
        uu: sum of u u^T, [U, U].
        ux: sum of u x^T, [U, X].
    """

    uu: Tensor
    ux: Tensor

    @classmethod
    def zero(cls, inputs: int, outputs: int) -> "Moments":
        """Return moments of no positions."""
        return cls(*(torch.zeros(inputs, size, dtype=torch.float64, device="cuda") for size in (inputs, outputs)))

    @classmethod
    def of(cls, given_NU: Tensor, wanted_NX: Tensor, sized_NH: Tensor) -> "Moments":
        """Return moments of positions, each divided by the root mean square of `sized_NH`."""
        weight_N1 = sized_NH.square().mean(-1, keepdim=True).rsqrt()
        given_NU, wanted_NX = given_NU * weight_N1, wanted_NX * weight_N1
        return cls((given_NU.T @ given_NU).double(), (given_NU.T @ wanted_NX).double())

    def add_(self, other: "Moments") -> None:
        """Add the moments of other positions."""
        self.uu.add_(other.uu)
        self.ux.add_(other.ux)

    def solved(self, ridge: float) -> Tensor:
        """Solve for W, [X, U]; the ridge is relative to the mean of uu's diagonal."""
        added = ridge * self.uu.diagonal().mean() * torch.eye(len(self.uu), dtype=self.uu.dtype, device=self.uu.device)
        return torch.linalg.solve(self.uu + added, self.ux).T

    def error(self, weight: Tensor) -> float:
        """Return the sum of squared errors of W, up to a constant."""
        return float((weight @ self.uu * weight).sum() - 2 * (weight.T * self.ux).sum())


@torch.no_grad()
def moments(model: LanguageModule, layer: int, tokens_S: Tensor) -> Moments:
    """Return the moments of one text, using modules of the first MTP layer and of the trunk."""
    entered: list[Tensor] = []
    hook = model.decoder.layers[layer].register_forward_pre_hook(
        lambda _, args, named: entered.append(named["hidden_states"]), with_kwargs=True
    )
    tokens_BS, positions_BS, hidden_SBH = run_trunk(model, tokens_S)
    hook.remove()
    depth: Any = model.mtp.layers[0]
    embedded_SBH = model.embedding(input_ids=tokens_BS[:, 1:], position_ids=positions_BS[:, :-1])
    u_NU = torch.cat([depth.enorm(embedded_SBH), depth.hnorm(hidden_SBH[:-1])], dim=-1)[:, 0]
    x_NX = entered[0][1:, 0]
    return Moments.of(u_NU, x_NX, x_NX)


def run_trunk(model: LanguageModule, tokens_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a trunk on a text. Return tokens and positions [1, S], and final states [S, 1, H]."""
    tokens_BS = tokens_S.cuda().unsqueeze(0)
    positions_BS = torch.arange(len(tokens_S), device="cuda").unsqueeze(0)
    hidden_SBH = model(tokens_BS, positions_BS, None, output_processor=lambda stage: stage.hidden_SBH)
    return tokens_BS, positions_BS, hidden_SBH
