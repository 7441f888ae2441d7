"""Convert checkpoints between Hugging Face and Megatron; the script form of `megatron-mtp convert`.

python tools/checkpoint/convert.py --help
"""

import sys
from pathlib import Path

from megatron_mtp.cli.main import run

if __name__ == "__main__":
    sys.exit(run("convert", Path(sys.argv[0]).name, sys.argv[1:]))
