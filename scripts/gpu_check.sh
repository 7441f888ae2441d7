#!/usr/bin/env bash
# What only a CUDA device can show: every part is a process of its own, with its own limit (150 s), log and figures.
#   scripts/gpu_check.sh [--parts PART ...] [--out DIR]    DIR/PART.json and DIR/PART.log, as the parts end
#   scripts/gpu_check.sh --merge DIR [DIR ...]             docs/gpu.md from the figures of several runs
# Takes the Python of .venv if there is one (scripts/setup.sh makes it), else the one on the PATH. Without a CUDA device it
# says so and ends with status 77, which test runners take for "skipped".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" benchmarks/gpu_check.py "$@"
