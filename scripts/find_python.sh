# shellcheck shell=bash
# A Python 3.12 or newer that can make virtual environments, on the PATH or under pyenv. setup.sh and bundle.sh source this.
#   find_python [3.N]    prints the first, or the first of that version; fails silently where there is none
find_python() {
    local candidate root=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for candidate in python3.12 python3.13 python3.14 python3 python \
        "$root"/3.12*/bin/python "$root"/3.13*/bin/python "$root"/3.14*/bin/python; do
        # A pyenv shim may be on the PATH and still find no interpreter behind it: only running it tells.
        if "$candidate" -c "import sys, venv, ensurepip; v = '%d.%d' % sys.version_info[:2]
sys.exit(sys.version_info < (3, 12) or '${1:-}' not in ('', v))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}
