#!/usr/bin/env bash
# Build the sdist and the wheel into dist/, and test each in an empty folder with every given Python.
#   scripts/release.sh [PYTHON ...]    default: python3.12
# The test preprocesses, trains two steps, converts, verifies, generates and serves; the sdist builds the wheel.
# Takes two to five minutes and 6 GB of disk per Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
    --help)
        sed -n '2,5s/^# //p' scripts/release.sh
        exit
        ;;
esac
[ $# -gt 0 ] || set -- python3.12
for python in "$@"; do
    "$python" -c 'import venv' || { echo "release.sh: error: $python does not run; name a Python 3.12 or newer." >&2; exit 2; }
done

rm -rf dist
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check build
"$folder/venv/bin/python" -m build --outdir dist . >/dev/null
rm -rf "$folder"
sdist=$(echo "$PWD"/dist/*.tar.gz) wheel=$(echo "$PWD"/dist/*.whl)
packed=$(tar -tzf "$sdist")
for name in docs/guides/pretrain.md scripts/quickstart.sh tests/unit/data/test_shift.py tools/data/preprocess.py pretrain_gpt.py; do
    grep -q "/$name\$" <<<"$packed" || { echo "release.sh: error: the sdist lacks $name." >&2; exit 1; }
done

constraints=$PWD/constraints.txt
for python in "$@"; do
    folder=$(mktemp -d)
    "$python" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    VIRTUAL_ENV=$folder/venv "$folder/venv/bin/uv" pip install --quiet --constraint "$constraints" "${wheel}[serve]"
    (cd "$folder" && PATH=$folder/venv/bin:$PATH bash -euo pipefail) <<'EOT'
texts=$(python -c 'import megatron_mtp, os; print(os.path.dirname(megatron_mtp.__file__))')
megatron-mtp preprocess --input "$texts" --include '*.py' --vocab-size 512 --output-prefix data/corpus
megatron-mtp train --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 4 --lr 1e-3 --train-iters 2 \
    --mtp-num-layers 2 --data-path data/corpus --split 90,10,0 --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model data/corpus-tokenizer --eval-interval 2 --eval-iters 1 --save checkpoint --save-interval 2
megatron-mtp convert mcore-to-hf checkpoint exported
megatron-mtp convert verify exported checkpoint
megatron-mtp generate --load checkpoint --prompt 'def ' --max-new-tokens 8 --speculative-config '{"method": "mtp"}'
megatron-mtp serve --load checkpoint --port 0 >served 2>&1 &
server=$!
for _ in $(seq 240); do grep -q http://127 served && break || sleep 0.5; done
url=$(grep -o 'http://127[0-9.:]*' served | head -n 1)
python -c "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1] + '/health').read().decode())" "$url"
kill -TERM "$server"
wait "$server" || [ $? = 143 ] || { cat served; exit 1; }
EOT
    echo "release: $("$python" --version): the wheel works alone"
    rm -rf "$folder"
done
ls -l dist
