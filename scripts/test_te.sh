#!/usr/bin/env bash
# Install Transformer Engine into a separate environment, without a GPU, and test checkpoints of its modules:
# tests/unit/megatron/test_transformer_engine.py.
#   scripts/test_te.sh [pytest arguments]
# Its torch extension has no published wheel: it is taken from the folder TE_WHEELS if that has one for this Python and
# torch, otherwise compiled, which needs nvcc and 15 minutes. The environment is .venv-te (3 GB). If it cannot be
# installed, the script prints a message and exits with status 77, which test runners report as skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

skip() { echo "test_te.sh: skipped, since $1"; exit 77; }
version=2.11.0
install() { VIRTUAL_ENV=.venv-te .venv/bin/uv pip install --quiet "$@"; }

if [ ! -e .venv-te/installed ]; then
    [ -x .venv/bin/uv ] || skip "uv is not in .venv (scripts/setup.sh puts it there where it can be had)"
    .venv/bin/uv venv --quiet --clear --python "$(readlink -f .venv/bin/python)" .venv-te
    install --constraint constraints.txt -e '.[dev]' pip pydantic importlib_metadata
    install --no-deps einops onnx onnx_ir onnxscript ml_dtypes "transformer_engine==$version" \
        "transformer_engine_cu13==$version" || skip "Transformer Engine cannot be installed here"
    install --no-deps ${TE_WHEELS:+--find-links "$TE_WHEELS"} --no-build-isolation "transformer_engine_torch==$version" ||
        skip "its torch extension can be neither found nor compiled here"
    touch .venv-te/installed
fi
.venv-te/bin/python -m pytest -n 0 tests/unit/megatron/test_transformer_engine.py "$@"
