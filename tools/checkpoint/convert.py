"""Convert checkpoints between Hugging Face and Megatron: the door of `megatron-mtp convert`.

python tools/checkpoint/convert.py --help
"""

import sys

from megatron_mtp.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main())
