#!/usr/bin/env bash
# Make a folder of wheels for machines without a network: scripts/setup.sh --bundle installs from it alone.
#   scripts/bundle.sh DIR [--have FILE] [--extras te,energy] [--add WHEEL] [--parts SIZE] [--python 3.12] [--machine x86_64]
# --help shows all flags, with examples. Safe to interrupt: the next run goes on.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=scripts/find_python.sh
source "$here/find_python.sh"
python=$(find_python) || {
    echo "bundle.sh: error: no Python 3.12 or newer with pip found on the PATH or under pyenv; install one." >&2
    exit 2
}
exec "$python" "$here/../tools/bundle/make.py" "$@"
