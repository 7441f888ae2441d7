"""Draft with the MTP layers of a checkpoint, and print how many tokens each forward pass of the trunk gave.

python examples/draft.py CHECKPOINT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_mtp.decoding import generate, load_runner
from megatron_mtp.megatron.runtime import prepare

prepare()
runner = load_runner(sys.argv[1])
made = generate(runner, [[1, 2, 3]], 32, speculative={"method": "mtp", "num_speculative_tokens": runner.depths})
print(made.token_ids[0])
print(f"{made.stats.accepted_length:.2f} tokens per forward")
