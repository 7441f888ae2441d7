#!/usr/bin/env bash
# Create .venv with everything that the quickstart and the tests need. Skips finished work; safe to interrupt.
#   scripts/setup.sh      uses the package index that pip is configured with
#   CONSTRAINTS=constraints-newest.txt scripts/setup.sh      the newest tested versions
# Needs Python 3.12 or newer (on the PATH or under pyenv) with pip, and nothing else.
set -euo pipefail
[ "${1:-}" != --help ] || {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
}
[ $# = 0 ] || {
    echo "setup.sh: error: the arguments are '$*'; give none, or --help." >&2
    exit 2
}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() { # print the first Python that is new enough and can create virtual environments
    local candidate root=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for candidate in python3.12 python3.13 python3.14 python3 python \
        "$root"/3.12*/bin/python "$root"/3.13*/bin/python "$root"/3.14*/bin/python; do
        # A pyenv shim on the PATH may have no interpreter behind it, so run it.
        if "$candidate" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

constraints=${CONSTRAINTS:-constraints.txt}
wanted=$(cat pyproject.toml "$constraints" | cksum)
[ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ] || exit 0
python=$(find_python) || {
    echo "setup.sh: no Python 3.12 or newer with pip found on the PATH or under pyenv; install one (for example 'pyenv install 3.12') and run this again." >&2
    exit 1
}
echo "setup: installing into .venv with $("$python" --version)"
if ! .venv/bin/python -c '' 2>/dev/null; then
    rm -rf .venv
    "$python" -m venv .venv
fi
# uv takes seconds where pip takes minutes; fall back to pip if uv cannot be installed.
if .venv/bin/python -m pip install --quiet --disable-pip-version-check uv 2>/dev/null &&
    VIRTUAL_ENV=.venv .venv/bin/uv pip install --quiet --constraint "$constraints" --editable '.[dev]'; then
    # With compiled modules, every process starts in a third of the time, even if PYTHONDONTWRITEBYTECODE is set. Half
    # of the source is skipped: packages of which a process imports only a file or two.
    .venv/bin/python -m compileall -qq -j 0 .venv/lib \
        -x '/(transformers/models|plotly|openai|networkx|matplotlib|fontTools|pygments|mypyc?|pip|setuptools)/' || true
else
    .venv/bin/python -m pip install --disable-pip-version-check --constraint "$constraints" --editable '.[dev]'
fi
echo "$wanted" >.venv/installed
echo "setup: done in $SECONDS s"
