#!/usr/bin/env bash
# Lint and tests, types among them; set-up included. A file of tests runs on each core, and one more.
#   scripts/test.sh                the first tier
#   scripts/test.sh --all          the whole matrix: before a release, and after a change of layouts, CPU stand-ins or patches
#   scripts/test.sh --newest       with the newest torch and transformers (constraints-newest.txt), which .venv then has
#   scripts/test.sh --megatron DIR with the Megatron of this checkout of Megatron-LM
#   scripts/test.sh [ARGUMENTS]    other arguments go to pytest, for example tests/unit -k packed
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
while true; do
    case "${1-}" in
        --help)
            sed -n '2,7s/^# //p' scripts/test.sh
            exit
            ;;
        --newest)
            export CONSTRAINTS=constraints-newest.txt # setup.sh reads it, also where a test calls it
            shift
            ;;
        --megatron)
            checkout=$(cd "$caller" && cd "${2-}" 2>/dev/null && pwd) || checkout=
            [ -n "${2-}" ] && [ -d "$checkout/megatron/core" ] || {
                echo "test.sh: error: --megatron is '${2-}', which has no megatron/core; name a checkout of Megatron-LM." >&2
                exit 2
            }
            export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}
            shift 2
            ;;
        *) break ;;
    esac
done
bash scripts/setup.sh

.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Images set PYTHONDONTWRITEBYTECODE; then every process of a run would compile the package and the tests anew.
env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 .venv/bin/python -m pytest "$@"
