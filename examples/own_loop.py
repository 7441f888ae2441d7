"""Train the MTP layers of a checkpoint in a custom loop, as in an RL trainer or a fine-tuning script.

    python examples/own_loop.py CHECKPOINT [STEPS]

The batch has prompts and answers: labels are masked on the prompts. Here the answers are random tokens, where a trainer
would have its rollouts; the policy's own loss is left out, and the trunk gets no gradient.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.losses.mtp_loss import mtp_loss, trunk_states
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.spec.config import MTPConfig

prepare()

ROWS, LENGTH, PROMPT = 4, 32, 12


def main(checkpoint: Path, steps: int) -> None:
    """Run a few steps of distillation, and print the loss by depth."""
    model = load_model(checkpoint).train()
    optimizer = torch.optim.AdamW(model.mtp.parameters(), lr=1e-3)
    settings = MTPConfig(mtp_loss="kd", mtp_train_only=True)
    tokens = attached_of(model).true_vocab_size or model.vocab_size
    for step in range(steps):
        stream_BS = torch.randint(tokens, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        tokens_BS, labels_BS = stream_BS[:, :-1], stream_BS[:, 1:]
        mask_BS = (torch.arange(LENGTH) >= PROMPT).expand_as(tokens_BS)
        with torch.no_grad():
            hidden_SBH = trunk_states(model, tokens_BS)
        made = mtp_loss(hidden_SBH, model, tokens_BS, labels_BS, mask_BS, settings)
        optimizer.zero_grad()
        made.loss.backward()
        optimizer.step()
        print(f"step {step}: " + ", ".join(f"depth {d} {mean:.4f}" for d, mean in enumerate(made.depth_means, start=1)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
