"""A training step that writes the order of Megatron's forward and backward passes on this rank as JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_mtp.megatron.runtime import prepare

if __name__ == "__main__":
    on_cpu = prepare()

    from megatron.core.pipeline_parallel import schedules

    from megatron_mtp.training.run import main

    place = sys.argv.index("--out")
    folder = Path(sys.argv[place + 1])
    del sys.argv[place : place + 2]
    ran: list[tuple[Any, ...]] = []
    forward, backward = schedules.forward_step, schedules.backward_step

    def forward_step(*given: Any, **named: Any) -> Any:
        ran.append(("F", named.get("vp_stage") or 0, named.get("current_microbatch")))
        return forward(*given, **named)

    def backward_step(*given: Any, **named: Any) -> Any:
        ran.append(("B",))
        return backward(*given, **named)

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    main(sys.argv, on_cpu)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(ran))
