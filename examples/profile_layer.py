"""Profile one MTP layer, forward and backward, on the inputs that a training step gives it.

python examples/profile_layer.py CHECKPOINT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.losses.mtp_loss import mtp_loss, trunk_states
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model.attachment import attached_of

ON_CPU = prepare()

ROWS, LENGTH = 4, 32


def main(checkpoint: Path) -> None:
    """Record the inputs of the first MTP layer in a step, and run the layer again under torch's profiler."""
    model = load_model(checkpoint).train()
    layer = model.mtp.layers[0]
    seen: dict[str, tuple[object, ...]] = {}
    layer.register_forward_pre_hook(lambda _, inputs: seen.setdefault("inputs", inputs) and None)
    tokens_BS, labels_BS = torch.randint(attached_of(model).true_vocab_size or model.vocab_size, (2, ROWS, LENGTH))
    hidden_SBH = trunk_states(model, tokens_BS).detach()
    mtp_loss(hidden_SBH, model, tokens_BS, labels_BS, torch.ones_like(tokens_BS))
    activities = [ProfilerActivity.CPU] if ON_CPU else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as profiled:
        layer(*seen["inputs"]).sum().backward()
    print(profiled.key_averages(group_by_input_shape=True).table(sort_by="self_cpu_time_total", row_limit=12))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
