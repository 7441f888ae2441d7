#!/usr/bin/env bash
# Install frameworks built on Megatron, each into its own folder, and test attached MTP layers in their models:
# tests/functional/test_stacks.py.
#   scripts/test_stacks.sh [NAME ...]            megatron_bridge, ms_swift, verl; default: all
#   scripts/test_stacks.sh --install [NAME ...]  only install; scripts/test.sh --all runs the tests
# Installs only the packages of integrations/NAME.txt, without their dependencies: .venv has the rest. verl also needs
# megatron_bridge. The folders are .venv-stacks/NAME (0.3 GB each). If a framework cannot be installed, its tests are
# skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

only_installs=false
if [ "${1-}" = --install ]; then
    only_installs=true
    shift
fi
names=("$@")
[ $# -gt 0 ] || names=(megatron_bridge ms_swift verl)
for name in "${names[@]}"; do
    [ -f "integrations/$name.txt" ] || {
        echo "test_stacks.sh: error: there is no framework '$name'; name megatron_bridge, ms_swift or verl." >&2
        exit 2
    }
    folder=.venv-stacks/$name
    if ! cmp -s "integrations/$name.txt" "$folder/installed.txt"; then
        rm -rf "$folder"
        if timeout 10m .venv/bin/python -m pip install --quiet --no-deps --target "$folder" \
            --requirement "integrations/$name.txt"; then
            cp "integrations/$name.txt" "$folder/installed.txt"
        else
            echo "test_stacks.sh: $name cannot be installed here; its cases are skipped"
        fi
    fi
done
if $only_installs; then exit; fi
cases=$(printf ' or %s' "${names[@]}")
.venv/bin/python -m pytest -n 0 --all tests/functional/test_stacks.py -k "${cases# or }"
