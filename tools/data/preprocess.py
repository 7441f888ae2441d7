"""Tokenize text to the `.bin` and `.idx` that Megatron trains on; the script form of `megatron-mtp preprocess`.

python tools/data/preprocess.py --help
"""

import sys
from pathlib import Path

from megatron_mtp.cli.main import run

if __name__ == "__main__":
    sys.exit(run("preprocess", Path(sys.argv[0]).name, sys.argv[1:]))
