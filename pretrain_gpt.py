"""Pretrain a GPT, with or without MTP depths, on Megatron's training loop: every Megatron flag, and --mtp-*.

    python pretrain_gpt.py --mtp-num-layers 2 ...                       one process
    torchrun --nproc-per-node 8 pretrain_gpt.py --mtp-num-layers 2 ...  one process a GPU

Without a CUDA device it runs on the CPU over gloo. `python pretrain_gpt.py --help` lists the flags.
"""

import sys

from megatron_mtp.platform import prepare

ON_CPU = prepare()

from megatron_mtp.training.run import main  # noqa: E402  (Megatron must see the prepared platform)

if __name__ == "__main__":
    main(sys.argv, ON_CPU)
