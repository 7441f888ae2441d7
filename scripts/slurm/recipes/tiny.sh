# shellcheck shell=bash disable=SC2034  # the jobs read the arrays
# A GPT of two layers on synthetic tokens, to try out the jobs: a CPU trains it in seconds.
: "${HF_MODEL:=models/tiny}" "${FAMILY:=glm4_moe}"
: "${DEPTHS:=2}" "${STEPS:=40}" "${SAVE_INTERVAL:=20}" "${MICRO_BATCH:=2}" "${GLOBAL_BATCH:=4}"
: "${LR:=1e-3}" "${SEED:=1234}"

MODEL=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.1 --hidden-dropout 0.1
    --mtp-num-layers "$DEPTHS"
)
LAYOUT=()
TRAINING=(
    --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$STEPS" --lr "$LR"
    --lr-decay-style constant --seed "$SEED"
    --save-interval "$SAVE_INTERVAL" --log-interval 1 --eval-interval "$STEPS" --eval-iters 2
)
DATA_FLAGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127)
