#!/usr/bin/env bash
# Everything that only a CUDA device can show, in less than eight minutes; the figures go to docs/gpu.md.
#   scripts/gpu_check.sh [flags of benchmarks/gpu_check.py]
# Takes the Python of .venv if there is one (scripts/setup.sh makes it), else the one on the PATH. Without a CUDA device it
# says so and ends with status 77, which test runners take for "skipped".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" benchmarks/gpu_check.py "$@"
