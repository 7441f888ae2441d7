"""Generate text with a trained GPT, drafting several tokens per forward pass with its MTP layers.

    python generate_gpt.py --load runs/quickstart/checkpoint --prompt 'def ' --speculative-config '{"method": "mtp"}'

`python generate_gpt.py --help` lists the flags; under torchrun the model is split over the processes (tensor parallel).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from megatron_mtp.cli.main import run

    sys.exit(run("generate", Path(sys.argv[0]).name, sys.argv[1:]))
