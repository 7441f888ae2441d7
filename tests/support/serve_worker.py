"""`megatron-mtp serve` as a script, for torchrun."""

import sys

from megatron_mtp.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
