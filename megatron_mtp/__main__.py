"""Run `python -m megatron_mtp` as `megatron-mtp`; under torchrun, `torchrun ... -m megatron_mtp train ...`."""

import sys

from megatron_mtp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
