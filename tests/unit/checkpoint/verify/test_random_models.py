"""Drafting logits with the cache match the training forward pass and transformers, or the model is rejected.

Random models of every kind and rotary scaling, with prompts long enough for the scaling to matter. A dozen run by
default; RANDOM_MODELS=88 in the environment runs the first 88, each kind with every scaling.
"""

import os
from pathlib import Path

import pytest
import torch
from compared_drafts import drafted_logits, off
from random_models import RandomModel, random_model
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.convert.import_hf import flags_of, hf_to_mcore
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.verify.prompt import Prompt
from megatron_mtp.checkpoint.verify.reference import all_logits
from megatron_mtp.checkpoint.verify.verify import megatron_logits
from megatron_mtp.decoding.load import load_checkpoint

QUIET = Options(quiet=True, workers=1)
SEEDS = range(int(os.environ["RANDOM_MODELS"])) if "RANDOM_MODELS" in os.environ else (4, *range(0, 84, 14))
FIRST = SEEDS if "RANDOM_MODELS" in os.environ else (4, 0, 42)
"""Seeds of the first tier; 4 has Kimi-K2's rotary settings."""
TOLERANCE = 1e-4
"""Relative to the largest logit, or to 1."""


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("seed", tiered(SEEDS, FIRST))
def test_a_random_model_is_drafted_as_transformers_runs_it_or_refused(seed: int, tmp_path: Path) -> None:
    model = random_model(seed)
    folder, mcore = model.write(tmp_path / "hf", seed), tmp_path / "mcore"
    hf_to_mcore(folder, mcore, QUIET)
    if model.refused is not None:
        return check_refused(folder, mcore, model.refused)
    tokens_BS = prompt_of(model, seed)
    with torch.no_grad():
        theirs = all_logits(folder, tokens_BS)
    trained = megatron_logits(mcore, Prompt.of(tokens_BS))
    drafted = drafted_logits(load_checkpoint(mcore).runner, tokens_BS)
    assert drafted.keys() == {"trunk", *(f"depth {number + 1}" for number in range(model.depths))}
    for name, logits_SV in drafted.items():
        difference = {"transformers": off(logits_SV, theirs[name]), "training": off(logits_SV, trained[name])}
        assert max(difference.values()) <= TOLERANCE, (model, name, difference)


def check_refused(folder: Path, mcore: Path, reason: str) -> None:
    """Check that conversion and drafting both reject the model."""
    flags, why = flags_of(HFModel.read(folder))
    assert flags is None
    assert why is not None
    assert reason in why
    with pytest.raises(ValueError, match="converted from a model that Megatron cannot run"):
        load_checkpoint(mcore)


def prompt_of(model: RandomModel, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config["vocab_size"], (1, model.slots), generator=generator)
