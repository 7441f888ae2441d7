"""A step of Megatron's own model in a plain loop, written by the function of docs/extensions/prove.md.

python tests/extensions/prove/own_step.py FOLDER FLAG ...
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.extensions.prove import stand_ins, worker

PAGE = Path(__file__).parents[3] / "docs/extensions/prove.md"


def main(folder: str, flags: list[str]) -> None:
    stand_ins.stand_in()
    stand_ins.stand_in_in_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_mtp.extensions.prove.cases import batch_of
    from megatron_mtp.extensions.prove.grads import described

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    tiny = described(flags)
    config = worker.config_of({"config": tiny.config}, {"config": {}, "in_bf16": False})
    model = worker.model_of({"model": tiny.model}, config)
    batch = batch_of("holes", 0)
    assert batch.labels is not None
    model(batch.tokens, batch.positions, None, labels=batch.labels, loss_mask=batch.mask).mul(
        batch.mask / batch.mask.sum()
    ).sum().backward()
    given = {"tokens": batch.tokens, "labels": batch.labels, "loss_mask": batch.mask}
    write_step(model, [given], tiny.depths, folder)


def write_step(model: Any, batches: list[dict[str, Any]], depths: int, folder: str) -> None:
    """Write it with the page's function, including the losses that Megatron logs."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert block is not None
    scope: dict[str, Any] = {}
    exec(block[1], scope)
    logged: dict[str, Any] = {}
    tracker: Any = MTPLossLoggingHelper
    tracker.track_mtp_metrics(1.0 / len(batches), 0, None, None, logged)
    losses = torch.stack([logged[f"mtp_{depth} loss"] for depth in range(1, depths + 1)])
    scope["write_step"](model, batches, losses, folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
