"""A training run that prints, as JSON, the files of the package whose code runs in its second step.

That is between the batch of the data iterator and the gradients of the losses: in Megatron's forward-backward function.
"""

import json
import sys
from pathlib import Path
from typing import Any

from megatron_mtp.runtime import prepare

if __name__ == "__main__":
    on_cpu = prepare()

    from megatron.training import training

    import megatron_mtp
    from megatron_mtp.training.run import main

    PACKAGE = Path(megatron_mtp.__file__).parent
    SECOND = 2
    get, found, steps = training.get_forward_backward_func, set[str](), list[None]()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (file := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            found.add(str(file.relative_to(PACKAGE)))

    def observed(*given: Any, **named: Any) -> Any:
        run = get(*given, **named)

        def step(*arguments: Any, **settings: Any) -> Any:
            steps.append(None)
            sys.setprofile(look if len(steps) == SECOND else None)
            try:
                return run(*arguments, **settings)
            finally:
                sys.setprofile(None)

        return step

    training.get_forward_backward_func = observed
    main(sys.argv, on_cpu)
    print(f"FILES {json.dumps(sorted(found))}", flush=True)
