# shellcheck shell=bash disable=SC2034  # the jobs read the arrays
# The shape of SmolLM2-135M with two MTP layers: use 1, 2, 4, ... 64 GPUs.
: "${DATA:=data/corpus}" "${TOKENIZER:=models/SmolLM2-135M}" "${HF_MODEL:=models/SmolLM2-135M}" "${FAMILY:=glm4_moe}"
: "${DEPTHS:=2}" "${SEQUENCE:=2048}" "${MICRO_BATCH:=8}" "${GLOBAL_BATCH:=512}"
: "${STEPS:=100000}" "${SAVE_INTERVAL:=1000}"
: "${LR:=3e-3}" "${SEED:=1234}"

MODEL=(
    --num-layers 30 --hidden-size 576 --ffn-hidden-size 1536
    --num-attention-heads 9 --group-query-attention --num-query-groups 3 --kv-channels 64
    --seq-length "$SEQUENCE" --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 100000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --mtp-num-layers "$DEPTHS" --mtp-loss-scaling-factor 0.3
)
LAYOUT=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TRAINING=(
    --bf16 --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$STEPS"
    --lr "$LR" --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta2 0.95 --init-method-std 0.042 --seed "$SEED"
    --save-interval "$SAVE_INTERVAL" --log-interval 10 --eval-interval 1000 --eval-iters 16
)
DATA_FLAGS=(
    --data-path "$DATA" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --make-vocab-size-divisible-by 128 --no-create-attention-mask-in-dataloader
)
