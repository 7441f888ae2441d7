#!/usr/bin/env bash
# Train a small GPT with an MTP layer on real text from scratch, measure its acceptance, and draft with it.
#   scripts/quickstart.sh
# The text is the source code of transformers, the largest Python package in .venv (about 50 MB). All output goes to
# runs/quickstart. Running it again resumes interrupted training; after finished training it only evaluates and
# verifies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

run=runs/quickstart
data=$run/data/corpus
.venv/bin/python tools/data/preprocess.py --input '.venv/lib/python3*/site-packages/transformers' --include '*.py' \
    --vocab-size 1024 --output-prefix "$data"

model=(
    --num-layers 7 --hidden-size 192 --num-attention-heads 3 --seq-length 256 --max-position-embeddings 256
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.06 --embedding-init-method-std 1.0
)
# A deep trunk and one MTP layer, which drafts two tokens: a draft is cheap compared to the trunk. The layer is
# distilled from the trunk's distribution, because the trunk decides which drafts are accepted.
mtp=(--mtp-num-layers 1 --mtp-loss kd --mtp-loss-scaling-factor 0.3 --mtp-metrics-dir "$run")
training=(
    --micro-batch-size 8 --global-batch-size 8 --train-iters 270
    --optimizer muon --muon-extra-scale-factor 0.2 --muon-nesterov   # for matrices; Adam for the rest, at the same learning rate
    --lr 1e-2 --min-lr 0 --lr-decay-style linear --lr-warmup-iters 20 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta2 0.95
)
if grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
    training+=(--bf16) # faster than float32 on this CPU; on others it may be many times slower
fi
corpus=(
    --data-path "$data" --split 98,2,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$data-tokenizer"
    --make-vocab-size-divisible-by 128 --no-create-attention-mask-in-dataloader
)
logging=(
    --eval-interval 180 --eval-iters 16 --tensorboard-dir "$run/tensorboard"
    --save "$run/checkpoint" --load "$run/checkpoint" --save-interval 135
)
.venv/bin/python pretrain_gpt.py "${model[@]}" "${mtp[@]}" "${training[@]}" "${corpus[@]}" "${logging[@]}"

# Export a Hugging Face folder that serving engines load, MTP layers included, and verify that it is the same model.
if [ "$run/checkpoint/latest_checkpointed_iteration.txt" -nt "$run/exported/config.json" ]; then # also true if config.json is missing
    rm -rf "$run/exported"
    .venv/bin/python tools/checkpoint/convert.py mcore-to-hf "$run/checkpoint" "$run/exported" --resume --verify
else
    .venv/bin/python tools/checkpoint/convert.py verify "$run/exported" "$run/checkpoint"
fi
echo "Hugging Face folder: $run/exported"
.venv/bin/python generate_gpt.py --load "$run/checkpoint" --prompt 'def forward(self, input_ids' --max-new-tokens 160 \
    --speculative-config '{"method": "mtp_eagle", "num_speculative_tokens": 2}' --compare --record "$run" \
    2>"$run/generate.txt" || { tail -n 5 "$run/generate.txt" >&2; exit 1; }

echo "losses, acceptance and every draft of this text on one page: $(.venv/bin/megatron-mtp report "$run")"
echo "the figures: $run/metrics.jsonl; Megatron's listing: $run/megatron.log"
