#!/usr/bin/env bash
# Lint and tests, types among them; set-up included. Two files of tests run at a time.
#   scripts/test.sh                the first tier
#   scripts/test.sh --all          the whole matrix: before a release, and after a change of layouts, CPU stand-ins or patches
#   scripts/test.sh [ARGUMENTS]    other arguments go to pytest, for example tests/unit -k packed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1-}" = --help ]; then
    sed -n '2,5s/^# //p' scripts/test.sh
    exit
fi
bash scripts/setup.sh

.venv/bin/ruff check .
.venv/bin/ruff format --check .
OMP_NUM_THREADS=1 .venv/bin/python -m pytest "$@"
