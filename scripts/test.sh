#!/usr/bin/env bash
# Set up, lint, type-check and test. A test file runs on each core.
#   scripts/test.sh                the first tier
#   scripts/test.sh --all          the whole matrix: before releases and after changes to layouts, CPU stand-ins or patches
#   scripts/test.sh --newest       install the newest torch and transformers (constraints-newest.txt) into .venv
#   scripts/test.sh --megatron DIR with Megatron from a checkout of Megatron-LM
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
            export CONSTRAINTS=constraints-newest.txt # read by setup.sh, which a test calls too
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
# Images set PYTHONDONTWRITEBYTECODE, which would make every process compile the package and the tests again.
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest "$@"
