#!/usr/bin/env bash
# Install Transformer Engine into an environment of its own, without a GPU, and test checkpoints of its modules:
# tests/unit/megatron/test_transformer_engine.py.
#   scripts/test_te.sh [pytest arguments]
# Its torch extension has no wheel; where TE_WHEELS names a folder with one for this Python and torch, it is taken from
# there, else it is compiled, which takes nvcc and a quarter of an hour. The environment is .venv-te (3 GB). Where it cannot
# be installed, the script says so and ends with status 77, which test runners take for "skipped".
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
OMP_NUM_THREADS=1 .venv-te/bin/python -m pytest -n 0 tests/unit/megatron/test_transformer_engine.py "$@"
