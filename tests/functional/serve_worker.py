"""`megatron-mtp serve` as a script, for ranks."""

import sys

from megatron_mtp.command.line import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
