#!/usr/bin/env bash
# Run the checks that need a CUDA device; see --help.
#   scripts/gpu_check.sh --short                                               only training, four minutes
#   scripts/gpu_check.sh [start] [--parts PART ...] [--minutes M] [--out DIR] [--device cpu --quick]
#   scripts/gpu_check.sh follow [--out DIR] [--seconds S] [--pack FILE.tgz]    print new output since the last call
#   scripts/gpu_check.sh --list                                                list the parts, their kinds and time limits
#   scripts/gpu_check.sh --merge DIR [DIR ...]                                 write docs/explanation/evidence_gpu.md from several runs
# Uses the Python of .venv if it exists (scripts/setup.sh creates it), otherwise the one on the PATH. Without a CUDA
# device it prints a message and exits with status 77, which test runners report as skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" benchmarks/gpu_check.py "$@"
