"""Run several command lines of `generate_gpt.py` in one process; print each exit status and output.

python generate_worker.py '[["--load", "..."], ...]'
"""

import contextlib
import io
import json
import sys

if __name__ == "__main__":
    from megatron_mtp.megatron.runtime import prepare

    prepare()

    from megatron_mtp.cli.generate import main

    outcomes = []
    for flags in json.loads(sys.argv[1]):
        said, status = io.StringIO(), 0
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                main(flags, "generate_gpt.py")
            except SystemExit as end:
                status = int(end.code or 0)
        outcomes.append({"status": status, "said": said.getvalue()})
    print(json.dumps(outcomes))
