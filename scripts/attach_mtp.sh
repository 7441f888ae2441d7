#!/usr/bin/env bash
# Give a model of Hugging Face's MTP depths that draft for it: `megatron-mtp attach`, step by step, so that a cluster can
# run every step in its own way (scripts/slurm).
#   scripts/attach_mtp.sh MODEL CORPUS [RUN_DIR]
# MODEL is a folder with config.json, safetensors and a tokenizer, or a name on the Hub; CORPUS is text: a folder, a file
# of JSON lines or a glob, of 25 documents or more: the last 2 % are kept for measuring. Everything goes to RUN_DIR
# (runs/attached). Started again, it goes on.
# Settings, as environment variables:
#   UNROLL 2 passes of one depth, or DEPTHS of their own   INIT fitted (last-layer, random)   LOSS kd (ce, kd, ...)
#   STEPS 600   SEQUENCE 512   BATCH 4   LR 5e-4   FRACTION 1   PRECISION --bf16   PATIENCE 3 evaluations without growth
#   Without LR or LOSS a long training chooses them by a probe: ONLY=probe TRIAL=I runs one candidate of it.
#   ONLY the steps to run, of all   TRUNK a Megatron checkpoint of MODEL, which then needs no weights
#   DONOR a model whose MTP layers are grafted and trained on (INIT donor)
#   FAMILY glm4_moe (or mimo; deepseek_v3 for latent attention)   PROMPT a text to draft on   FLAGS more of pretrain_gpt.py
#   SELF_GENERATED N texts of the model itself to train on   TEMPERATURE, NEW_TOKENS, PROMPT_TOKENS of these texts
#   SAVE_INTERVAL STEPS   PYTHON, LAUNCH: commands to run programs and trainings with, in place of .venv (scripts/slurm)
set -euo pipefail
model=${1:?give the folder of a Hugging Face model}
corpus=${2:?give the text to train on: a file, a folder or a glob}
run=$(realpath -m "${3:-runs/attached}")
if [ -e "$model" ]; then model=$(realpath "$model"); fi
if [[ $corpus != /* ]]; then corpus=$PWD/$corpus; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${PYTHON:-}" ] || bash scripts/setup.sh
python=${PYTHON:-.venv/bin/python}
launch=${LAUNCH:-$python}

# shellcheck disable=SC2206  # PRECISION and FLAGS are several words
attach=(
    -m megatron_mtp attach "$model" "$corpus" "$run" --steps "${STEPS:-600}"
    ${DEPTHS:+--mtp-layers "${DEPTHS:-}"} ${UNROLL:+--unroll "${UNROLL:-}"} ${INIT:+--mtp-init "${INIT:-}"}
    ${DONOR:+--donor "${DONOR:-}"} ${TRUNK:+--load "${TRUNK:-}"} ${LR:+--learning-rate "${LR:-}"}
    --sequence "${SEQUENCE:-512}" --batch "${BATCH:-4}" ${LOSS:+--loss "${LOSS:-}"}
    --token-fraction "${FRACTION:-1}" ${FAMILY:+--family "${FAMILY:-}"} --evaluated-batches "${EVAL_ITERS:-8}" --patience "${PATIENCE:-3}"
    --save-every "${SAVE_INTERVAL:-${STEPS:-600}}" ${PROMPT:+--prompt "${PROMPT:-}"}
    --temperature "${TEMPERATURE:-0.7}" --max-new-tokens "${NEW_TOKENS:-256}" --prompt-tokens "${PROMPT_TOKENS:-32}"
    ${SELF_GENERATED:+--self-generated "${SELF_GENERATED:-}"} --float32 ${PRECISION---bf16} ${FLAGS:-}
)
for step in ${ONLY:-corpus trunk start sample before probe train export verify draft}; do
    case $step in
        before | train) $launch "${attach[@]}" --only "$step" ;;
        probe)
            if [ -n "${TRIAL:-}" ]; then
                $launch "${attach[@]}" --only probe --trial "$TRIAL"
                continue
            fi
            left=$($python "${attach[@]}" --only probe --dry-run)
            until [[ $left == *": finished" ]]; do
                $launch "${attach[@]}" --only probe # a trial
                left=$($python "${attach[@]}" --only probe --dry-run)
            done
            $python "${attach[@]}" --only probe # the table
            ;;
        *) $python "${attach[@]}" --only "$step" ;;
    esac
done
echo "before: $run/before/metrics.jsonl; after, by depth: $run/metrics.jsonl (megatron-mtp report $run draws it); Hugging Face folder: $run/exported"
