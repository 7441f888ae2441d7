"""Train, attach, export and draft with the kind of drafter that docs/develop/extending_drafters.md adds.

PYTHONPATH=PACKAGES:tests/support python tests/support/added_drafter.py FOLDER
"""

import json
import sys
from pathlib import Path

from drafter_folders import DRAFTED, KINDS, READ, make_drafter, make_trunk
from megatron.core import parallel_state
from megatron_single import join_world_of_one, make_batch, one_head, our_model

from megatron_mtp.checkpoint.hf.folder import drafter_kind
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.losses.head_objective import depth_weights
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.spec.config import MTPConfig

STEPS, LAYERS = 3, (1, 4)


def train() -> None:
    settings = MTPConfig(drafter="adder", drafter_steps=STEPS, mtp_loss="kd")
    weights = depth_weights(settings, STEPS, 1.0)
    assert weights == [1.0, 0.8, 0.8**2]
    model = our_model(STEPS, num_layers=5, drafter_layers=LAYERS, drafter={"drafter": "adder"})
    batch = make_batch(STEPS)
    group = parallel_state.get_context_parallel_group()
    output = model(
        *(batch[name] for name in ("tokens", "position_ids", "attention_mask")),
        labels=batch["labels"],
        output_processor=one_head(weights, group, depth_loss(settings), linear_main=True, trains_trunk=False),
        output_processor_context=[batch["depths"]],
    )
    output.loss.backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert "mtp.layers.0.fc.weight" in trained
    assert all(name.startswith("mtp.") for name in trained)


def convert_and_draft(folder: Path) -> None:
    KINDS["adder"] = "adder", {**READ, "drafter_layers": [*LAYERS]}, DRAFTED
    folder.mkdir()
    _, trunk = make_trunk(folder)
    exported, saved = make_drafter(folder, "adder", trunk)
    assert drafter_kind(exported) == "adder"
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["AdderDraftModel"]
    prompts, runner = [[5, 6, 7], [1, 2, 3, 4]], Runner(load_model(saved))
    assert runner.kind == "adder"
    texts = generate(runner, prompts, 8, speculative={"method": "adder", "num_speculative_tokens": 2})
    assert texts.stats.drafted
    assert texts.token_ids == generate(runner, prompts, 8).token_ids


if __name__ == "__main__":
    quieten()
    join_world_of_one()
    train()
    convert_and_draft(Path(sys.argv[1]))
