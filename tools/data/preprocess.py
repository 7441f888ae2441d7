"""Turn text into the `.bin` and `.idx` that Megatron trains on: the door of `megatron-mtp preprocess`.

python tools/data/preprocess.py --help
"""

import sys

from megatron_mtp.data.command import main

if __name__ == "__main__":
    sys.exit(main())
