#!/usr/bin/env bash
# Make .venv with everything that the quickstart and the tests need. Skips what is done; safe to interrupt.
#   scripts/setup.sh                  from the package index that pip is set up with
#   scripts/setup.sh --bundle DIR     from a folder of scripts/bundle.sh alone, without a network; DIR's extras are installed, too
# Needs Python 3.12 or newer (on the PATH or under pyenv) with pip, and nothing else; a bundle needs the Python it was made for.
#   scripts/setup.sh --bundle /media/bundle
set -euo pipefail
[ "${1:-}" != --help ] || {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
}

die() {
    echo "setup.sh: error: $*" >&2
    exit 2
}

bundle=
if [ $# -gt 0 ]; then
    [ "$1" = --bundle ] && [ $# = 2 ] || die "the arguments are '$*'; give none, --help, or --bundle DIR."
    bundle=$(cd "$2" 2>/dev/null && pwd) || die "--bundle $2 is no folder; give one that scripts/bundle.sh made."
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/find_python.sh

is_done() { # and not by another bundle
    [ "$(cat .venv/installed 2>/dev/null)" = "$wanted" ] &&
        { [ -z "$bundle" ] || cmp -s "$bundle/SHA256SUMS" .venv/bundle; }
}

from_index() {
    python=$(find_python) || {
        echo "setup.sh: no Python 3.12 or newer with pip found on the PATH or under pyenv; install one (for example 'pyenv install 3.12') and run this again." >&2
        exit 1
    }
    echo "setup: installing into .venv with $("$python" --version)"
    if ! .venv/bin/python -c '' 2>/dev/null; then
        rm -rf .venv
        "$python" -m venv .venv
    fi
    # uv installs in seconds what takes pip minutes; where it cannot be had, pip does it. Compiled modules make every process
    # start in a third of the time, also where Python may not write them itself (PYTHONDONTWRITEBYTECODE).
    if .venv/bin/python -m pip install --quiet --disable-pip-version-check uv 2>/dev/null &&
        VIRTUAL_ENV=.venv .venv/bin/uv pip install --quiet --compile-bytecode --constraint constraints.txt --editable '.[dev]'; then
        :
    else
        .venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
    fi
}

said() { # a line of the bundle's `target`
    sed -n "s/^$1 //p" "$bundle/target"
}

check_bundle() {
    local checked
    if compgen -G "$bundle/part-*" >/dev/null; then
        die "--bundle $bundle has the parts of a bundle; join them first: scripts/join_bundle.sh $bundle DIR."
    fi
    [ -f "$bundle/SHA256SUMS" ] || die "--bundle $bundle is not a whole bundle; give a folder that scripts/bundle.sh made."
    if ! checked=$(cd "$bundle" && LC_ALL=C sha256sum --check SHA256SUMS 2>/dev/null); then
        die "of the files in $bundle, these are damaged or missing:" \
            "$(sed -n 's/: FAILED.*//p' <<<"$checked" | paste -sd ' '); copy them again."
    fi
    [ "$(said machine)" = "$(uname -m)" ] ||
        die "--bundle $bundle is for $(said machine), and this machine is $(uname -m); make one with --machine $(uname -m)."
    python=$(find_python "$(said python)") ||
        die "--bundle $bundle is for Python $(said python), which was not found here with pip and venv; make one with --python for the Python of this machine, or install that one."
}

from_bundle() {
    local options=(--clear) extras lacking
    check_bundle
    echo "setup: installing into .venv with $("$python" --version) from $bundle"
    [ "$(said site-packages)" = no ] || options+=(--system-site-packages) # what the target has besides
    rm -f .venv/installed
    "$python" -m venv "${options[@]}" .venv
    extras=$(said extras)
    lacking=$(.venv/bin/python tools/bundle/lacking.py "$bundle" "$extras")
    [ -z "$lacking" ] || die "of what constraints.txt names, neither $bundle nor this machine has $lacking; make the bundle" \
        "with this checkout's scripts/bundle.sh, and with --have only if that is the package list of this $python."
    unset "${!PIP_@}" # no index, links or constraints but these
    PIP_CONFIG_FILE=/dev/null .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-index \
        --find-links "$bundle" --constraint constraints.txt --editable ".[dev${extras:+,$extras}]" 2>.venv/errors ||
        die "pip cannot install from $bundle ($(grep ERROR .venv/errors | tail -n 1)); .venv/errors has all that it said."
    cp "$bundle/SHA256SUMS" .venv/bundle
}

wanted=$(cat pyproject.toml constraints.txt | cksum)
if is_done; then
    exit 0
fi
if [ -n "$bundle" ]; then from_bundle; else from_index; fi
echo "$wanted" >.venv/installed
echo "setup: done in $SECONDS s"
