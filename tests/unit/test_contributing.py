"""The examples of CONTRIBUTING.md: each is run as it is printed, and does what the page says."""

from collections.abc import Iterator

import pytest
import torch
from documents import ROOT, blocks
from drafting_single import prompts_of, runner_of
from torch import Tensor

from megatron_mtp.config import LOSS_NAMES, MTPConfig
from megatron_mtp.drafting.api import generate
from megatron_mtp.drafting.config import METHODS
from megatron_mtp.drafting.proposers import PROPOSERS
from megatron_mtp.losses import LOSSES
from megatron_mtp.losses.linear_cross_entropy import Targets, linear_loss
from megatron_mtp.losses.vocabulary import Vocabulary


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What an example registers is known to its test alone."""
    tables, names = (PROPOSERS, LOSSES), (METHODS, LOSS_NAMES)
    rows, known = [dict(table) for table in tables], [list(each) for each in names]
    yield
    for table, before in zip(tables, rows, strict=True):
        table.clear()
        table.update(before)  # type: ignore[arg-type]
    for each, before in zip(names, known, strict=True):
        each[:] = before


def run_example(heading: str) -> None:
    """Execute the code under a heading of the page."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    ((_, code),) = blocks(section, "python")
    exec(compile(code, heading, "exec"), {"__name__": "example"})


@pytest.mark.usefixtures("megatron")
def test_a_method_drafts_and_changes_no_token() -> None:
    runner, prompts = runner_of(), prompts_of(4)
    settings = {"method": "echo", "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="choose one of mtp"):
        generate(runner, prompts, 40, speculative=settings)
    run_example("A drafting method")
    drafted = generate(runner, prompts, 40, speculative=settings)
    assert drafted.token_ids == generate(runner, prompts, 40).token_ids
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


def focal(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """As its definition reads."""
    log_N = logits_NV.log_softmax(1).gather(1, labels_N.unsqueeze(1))[:, 0]
    return -((1 - log_N.exp()) ** 2) * log_N


def test_a_loss_has_the_gradient_of_its_definition() -> None:
    with pytest.raises(ValueError, match="--mtp-loss is 'focal'"):
        MTPConfig(mtp_loss="focal")
    run_example("A loss")
    generator = torch.Generator().manual_seed(4)
    states_NH = torch.randn(12, 6, generator=generator, dtype=torch.double)
    weight_VH = torch.randn(20, 6, generator=generator, dtype=torch.double)
    mask_N = torch.rand(12, generator=generator, dtype=torch.double)
    labels_N, scale = torch.randint(20, (12,), generator=generator), torch.tensor(0.3, dtype=torch.double)

    def ours(states_NH: Tensor, weight_VH: Tensor) -> Tensor:
        loss = LOSSES["focal"](MTPConfig(mtp_loss="focal"))
        return linear_loss(loss, [states_NH], [Targets(labels_N, mask_N, scale)], weight_VH, Vocabulary(20))[0]

    def plain(states_NH: Tensor, weight_VH: Tensor) -> Tensor:
        return scale * focal(states_NH @ weight_VH.t(), labels_N).dot(mask_N)

    leaves = [leaf.requires_grad_() for leaf in (states_NH, weight_VH)]
    made = [(value := side(*leaves), *torch.autograd.grad(value, leaves)) for side in (ours, plain)]
    torch.testing.assert_close(*made, rtol=1e-10, atol=1e-12)


def test_every_name_has_its_row() -> None:
    assert set(METHODS) == {*PROPOSERS, "draft_model"}
    assert set(LOSS_NAMES) == set(LOSSES)
