#!/usr/bin/env bash
# Lint, types, unit and functional tests; set-up included. Arguments go to pytest, which runs two files at a time.
#   scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
OMP_NUM_THREADS=1 .venv/bin/python -m pytest "$@"
