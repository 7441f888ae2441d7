#!/usr/bin/env bash
# Build the documentation site in runs/site, without network access; broken links and anchors are errors.
#   scripts/docs.sh [FOLDER]      output folder; default: runs/site
# Needs the extra `docs`: pip install -e '.[docs]'. Set PYTHON to use an interpreter other than .venv's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
"$python" -c 'import material, mkdocs, mkdocstrings' 2>/dev/null || {
    echo "docs.sh: error: $python has no mkdocs-material and mkdocstrings; run $python -m pip install -e '.[docs]' first." >&2
    exit 2
}
site=$(realpath --canonicalize-missing "${1:-runs/site}")
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict --site-dir "$site"
echo "$site/index.html; for the search: python -m http.server --directory $site"
