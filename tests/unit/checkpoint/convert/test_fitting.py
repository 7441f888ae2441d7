"""checkpoint/convert/fitting.py: eh_proj against float64 least squares on transformers' states."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hf_models import HIDDEN, VOCABULARY, make
from tiers import tiered
from transformers import AutoModelForCausalLM
from written_datasets import write_dataset, write_random_dataset

from megatron_mtp.checkpoint.convert import fitting
from megatron_mtp.checkpoint.convert.edit import Template
from megatron_mtp.checkpoint.convert.fitting import HELD_OUT, RIDGES, FitData, Moments, moments
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("megatron")

EH_PROJ = "mtp.layers.{}.eh_proj.weight"
SEED = 1234


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_random_dataset(tmp_path / "corpus", VOCABULARY)


def attached(source: Path, corpus: str, *flags: str) -> Path:
    """Create a checkpoint with two fitted MTP layers next to the folder."""
    mcore, new = source.parent / "mcore", source.parent / "new"
    assert main(["hf-to-mcore", str(source), str(mcore)]) == 0
    fitted = ["--mtp-num-layers", "2", "--mtp-init", "fitted", "--data-path", corpus, *flags]
    assert main(["attach-mtp", str(mcore), str(new), *fitted]) == 0
    return new


def rows(model: Any, tokens_S: torch.Tensor, later: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return u [N, 2H] and x [N, H] of a document, computed by transformers' module and divided by the RMS of x."""
    with torch.no_grad():
        states = model(tokens_S[None], output_hidden_states=True).hidden_states
        embedded_SH = model.get_input_embeddings()(tokens_S)
    entered_SH, final_SH = states[-2][0].double(), states[-1][0].double()
    halves = [torch.nn.functional.rms_norm(one, one.shape[-1:], eps=1e-6) for one in (embedded_SH.double(), final_SH)]
    last = len(tokens_S) - 1
    u_NH, x_NH = torch.cat([halves[0][later : later + last], halves[1][:last]], -1), entered_SH[1:]
    weight_N1 = x_NH.square().mean(-1, keepdim=True).rsqrt()
    return (u_NH * weight_N1).numpy(), (x_NH * weight_N1).numpy()


def least_squares(texts: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return eh_proj [H, 2H] from least squares with ridge rows; the ridge is chosen on every eighth document."""

    def solved(chosen: list[tuple[np.ndarray, np.ndarray]], ridge: float) -> np.ndarray:
        u, x = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
        added = np.sqrt(ridge * np.square(u).sum(0).mean()) * np.eye(u.shape[1])
        return np.linalg.lstsq(np.vstack([u, added]), np.vstack([x, np.zeros((u.shape[1], x.shape[1]))]))[0].T

    held_out = texts[HELD_OUT - 1 :: HELD_OUT]
    fitted = [text for number, text in enumerate(texts, 1) if number % HELD_OUT]

    def left(ridge: float) -> float:
        weight = solved(fitted, ridge)
        return sum(np.square(u @ weight.T - x).sum() for u, x in held_out)

    return solved(texts, min(RIDGES, key=left))


def test_eh_proj_is_the_least_squares_fit_of_the_trunks_states(tmp_path: Path, corpus: str) -> None:
    source = make(tmp_path / "hf", "llama", 0)
    found = DistReader(attached(source, corpus))
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    texts = FitData(corpus).texts(HIDDEN, SEED)
    assert fitting.TOKENS_A_WIDTH * HIDDEN <= sum(map(len, texts)) < fitting.TOKENS_A_WIDTH * HIDDEN + fitting.LENGTH
    right = least_squares([rows(model, text) for text in texts])
    for depth in range(2):
        np.testing.assert_allclose(found.read(EH_PROJ.format(depth)).numpy(), right, atol=2e-4)
    unshifted = least_squares([rows(model, text, later=0) for text in texts])
    for fault in (unshifted, np.roll(right, HIDDEN, axis=1)):
        assert np.abs(fault - right).max() > 0.05


KINDS = ["llama", "glm4_moe", "deepseek_v3", "nemotron_h", "qwen3_next"]


@pytest.mark.parametrize("family", tiered(KINDS, ("nemotron_h",)))
def test_fitted_mtp_layers_start_closer_to_the_trunk(family: str, tmp_path: Path, corpus: str) -> None:
    """For every type of trunk, on documents that were not used in the fit."""
    new = attached(make(tmp_path / "hf", family, 0), corpus)
    eh_proj = DistReader(new).read(EH_PROJ.format(1)).double()
    layer = next(iter(Template.of(DistReader(new)).stack))
    others, model = Moments.zero(2 * HIDDEN, HIDDEN), load_model(new)
    for text in FitData(corpus).texts(HIDDEN, SEED + 1):
        others.add_(moments(model, layer, text))
    passed_on = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1).double()
    assert others.error(eh_proj) < min(others.error(passed_on), others.error(torch.zeros_like(eh_proj)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mtp-init fitted", "--mtp-init fitted has no text; give --data-path, the prefix of a .bin and .idx."),
        ("--data-path {corpus}", "--data-path is of --mtp-init fitted, and --mtp-init is last-layer; leave it out"),
        ("--mtp-init random --split 9,1,0", "--split is of --mtp-init fitted, and --mtp-init is random; leave it out"),
        ("--mtp-init fitted --data-path {corpus} --fit-tokens 0", "--fit-tokens is 0; give 1 or more"),
        ("--mtp-init fitted --data-path {corpus} --fit-tokens 95", "has 95 tokens of '{corpus}' for 96 unknowns"),
        ("--mtp-init fitted --data-path {corpus} --split 0,1,0", "leaves none for training"),
        ("--mtp-init fitted --data-path {corpus} --split a", "--split is 'a'"),
        ("--mtp-init fitted --data-path nowhere", "--data-path: there is no dataset 'nowhere'"),
        ("--mtp-init fitted --data-path {large}", "vocabulary"),
    ],
)
def test_impossible_fits_are_rejected_before_any_work(
    flags: str, message: str, tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mcore, new = tmp_path / "mcore", tmp_path / "new"
    assert main(["hf-to-mcore", str(make(tmp_path / "hf", "llama", 0)), str(mcore)]) == 0
    large = write_dataset(tmp_path / "large", [[500] * 200] * 9)
    words = flags.format(corpus=corpus, large=large).split()
    capsys.readouterr()
    assert main(["attach-mtp", str(mcore), str(new), "--mtp-num-layers", "1", *words]) == 2
    said = capsys.readouterr().err
    assert message.format(corpus=corpus) in said
    assert said.count("\n") == 1
    assert not new.exists()


def test_a_trunk_that_does_not_fit_into_the_memory_is_refused(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mcore, new = tmp_path / "mcore", tmp_path / "new"
    assert main(["hf-to-mcore", str(make(tmp_path / "hf", "llama", 0)), str(mcore)]) == 0
    parameters = sum(torch.Size(DistReader(mcore).shape(key)).numel() for key in DistReader(mcore).keys)
    words = f"attach-mtp {mcore} {new} --mtp-num-layers 1 --mtp-init fitted --data-path {corpus} --dry-run".split()
    for free, status in (4 * parameters, 0), (4 * parameters - 1, 2):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert main(words) == status
    assert "which takes 0.0 GB, and 0.0 GB are free; give --mtp-init last-layer" in capsys.readouterr().err


def test_a_plan_does_not_run_the_trunk(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mcore, new = tmp_path / "mcore", tmp_path / "new"
    assert main(["hf-to-mcore", str(make(tmp_path / "hf", "llama", 0)), str(mcore)]) == 0
    monkeypatch.setattr(fitting, "moments", None)
    words = f"attach-mtp {mcore} {new} --mtp-num-layers 2 --mtp-init fitted --data-path {corpus} --dry-run --json"
    assert main(words.split()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["depths"] == 2
    assert not new.exists()
