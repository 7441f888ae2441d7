#!/usr/bin/env bash
# Install llama.cpp's Python bindings into a separate environment, and test exported folders with them:
# tests/extensions/predict/test_llama_cpp.py.
#   scripts/test_llama_cpp.sh [pytest arguments]
# If they cannot be installed, it prints a message and exits with status 77, which test runners report as skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

if [ ! -e .venv-llama/installed ]; then
    python=$(readlink -f .venv/bin/python)
    "$python" -m venv --clear .venv-llama
    .venv-llama/bin/pip install --quiet 'xllamacpp==2026.10.*' 'gguf==0.19.*' safetensors ||
        { echo "test_llama_cpp.sh: skipped, since xllamacpp and gguf cannot be installed here"; exit 77; }
    touch .venv-llama/installed
fi
.venv/bin/python -m pytest -n 0 tests/extensions/predict/test_llama_cpp.py "$@"
