"""Pretrain a GPT, with or without MTP layers, in Megatron's training loop: every Megatron flag, and --mtp-*.

    python pretrain_gpt.py --mtp-num-layers 2 ...                       one process
    torchrun --nproc-per-node 8 pretrain_gpt.py --mtp-num-layers 2 ...  one process per GPU

Without a CUDA device it runs on the CPU over gloo. `python pretrain_gpt.py --help` lists the flags.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # processes that write checkpoints import this file, and need nothing from it
    from megatron_mtp.cli.main import run

    sys.exit(run("train", Path(sys.argv[0]).name, sys.argv[1:]))
