#!/usr/bin/env bash
# What only a CUDA device can show; --help says more.
#   scripts/gpu_check.sh --short                                               training alone, in four minutes
#   scripts/gpu_check.sh [start] [--parts PART ...] [--minutes M] [--out DIR] [--device cpu --quick]
#   scripts/gpu_check.sh follow [--out DIR] [--seconds S] [--pack FILE.tgz]    what happened since the last look
#   scripts/gpu_check.sh --list                                                the parts, their kinds and limits
#   scripts/gpu_check.sh --merge DIR [DIR ...]                                 docs/explanation/evidence_gpu.md from the figures of several runs
# Takes the Python of .venv if there is one (scripts/setup.sh makes it), else the one on the PATH. Without a CUDA device it
# says so and ends with status 77, which test runners take for "skipped".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" benchmarks/gpu_check.py "$@"
