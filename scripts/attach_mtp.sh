#!/usr/bin/env bash
# Give a model of Hugging Face's MTP depths that draft for it: attached, distilled on a frozen trunk, measured, exported.
#   scripts/attach_mtp.sh MODEL_DIR CORPUS [RUN_DIR]
# MODEL_DIR holds config.json, safetensors and a tokenizer; CORPUS is text for tools/data/preprocess.py: a folder, a file
# of JSON lines or a glob, of 25 documents or more: the last 2 % are kept for measuring. Everything goes to RUN_DIR
# (runs/attached). Started again, it goes on.
# Settings, as environment variables:
#   DEPTHS 2   STEPS 600   SEQUENCE 512   BATCH 4   LR 5e-4   LOSS kd (ce, kd, tv)   FRACTION 1   PRECISION --bf16
#   FAMILY glm4_moe (or mimo; deepseek_v3 for latent attention)   PROMPT a text to draft on   FLAGS more of pretrain_gpt.py
#   SAVE_INTERVAL STEPS   PYTHON, LAUNCH: commands to run programs and trainings with, in place of .venv (scripts/slurm)
set -euo pipefail
model=$(realpath "${1:?give the folder of a Hugging Face model}")
corpus=${2:?give the text to train on: a file, a folder or a glob}
run=$(realpath -m "${3:-runs/attached}")
if [[ $corpus != /* ]]; then corpus=$PWD/$corpus; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${PYTHON:-}" ] || bash scripts/setup.sh
depths=${DEPTHS:-2} steps=${STEPS:-600} sequence=${SEQUENCE:-512} batch=${BATCH:-4}
python=${PYTHON:-.venv/bin/python}
launch=${LAUNCH:-$python}

$python tools/data/preprocess.py --input "$corpus" --tokenizer "$model" --output-prefix "$run/data/corpus"
[ -d "$run/trunk" ] || $python tools/checkpoint/convert.py hf-to-mcore "$model" "$run/trunk" --resume
[ -d "$run/start" ] || $python tools/checkpoint/convert.py attach-mtp "$run/trunk" "$run/start" \
    --mtp-num-layers "$depths" --mtp-init last-layer --resume

# shellcheck disable=SC2206  # PRECISION and FLAGS are several words
train=(
    --use-checkpoint-args --mtp-num-layers "$depths" --mtp-train-only --mtp-loss "${LOSS:-kd}" --mtp-loss-scaling-factor 1
    --mtp-token-fraction "${FRACTION:-1}"
    --seq-length "$sequence" --micro-batch-size "$batch" --global-batch-size "$batch" --train-iters "$steps"
    --lr "${LR:-5e-4}" --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters $((steps / 20 + 1)) --clip-grad 1.0
    --weight-decay 0.01 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0
    --data-path "$run/data/corpus" --split 98,2,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$model"
    --no-create-attention-mask-in-dataloader --log-interval 10 --eval-iters "${EVAL_ITERS:-8}"
    ${PRECISION---bf16} ${FLAGS:-}
)
shown='error|Error|^>|^ \[.* iteration |validation loss|^[+|]|expected accepted|saving checkpoint'
evaluate() { # of a checkpoint, on the text that is kept back
    $launch pretrain_gpt.py "${train[@]}" --skip-train --eval-interval 1 --load "$1" --finetune --mtp-metrics-dir "$run/before" 2>&1 | tee "$2" |
        grep -E 'rror|^[+|]|expected accepted' || { tail -n 5 "$2" >&2; exit 1; }
}

[ -e "$run/before.txt" ] || { evaluate "$run/start" "$run/before.partial"; mv "$run/before.partial" "$run/before.txt"; }
load=(--load "$run/checkpoint")
[ -e "$run/checkpoint/latest_checkpointed_iteration.txt" ] || load=(--load "$run/start" --finetune)
$launch pretrain_gpt.py "${train[@]}" "${load[@]}" --save "$run/checkpoint" --save-interval "${SAVE_INTERVAL:-$steps}" \
    --eval-interval "$steps" --mtp-metrics-dir "$run" 2>&1 | tee "$run/log.txt" | grep --line-buffered -E "$shown"

if [ "$run/checkpoint/latest_checkpointed_iteration.txt" -nt "$run/exported/config.json" ]; then # also where there is none
    rm -rf "$run/exported"
    $python tools/checkpoint/convert.py mcore-to-hf "$run/checkpoint" "$run/exported" --family "${FAMILY:-glm4_moe}" \
        --tokenizer "$model" --resume
fi
$python tools/checkpoint/convert.py verify "$run/exported" "$run/checkpoint"
$python generate_gpt.py --load "$run/checkpoint" --prompt "${PROMPT:-The state of the union is}" --max-new-tokens 96 \
    --speculative-config '{"method": "mtp"}' --compare 2>"$run/generate.txt" ||
    { tail -n 5 "$run/generate.txt" >&2; exit 1; }
echo "before: $run/before/metrics.jsonl; after, by depth: $run/metrics.jsonl and $run/metrics.png; Hugging Face folder: $run/exported"
