# shellcheck shell=bash disable=SC2034  # the jobs read the arrays
# The shape of Qwen3-8B with one MTP layer. Tensor parallel over 2 ranks: use 2, 4, 8, ... GPUs.
: "${DATA:=data/corpus}" "${TOKENIZER:=models/Qwen3-8B}" "${HF_MODEL:=models/Qwen3-8B}" "${FAMILY:=glm4_moe}"
: "${DEPTHS:=1}" "${SEQUENCE:=4096}" "${MICRO_BATCH:=1}" "${GLOBAL_BATCH:=512}"
: "${STEPS:=100000}" "${SAVE_INTERVAL:=500}"
: "${LR:=3e-4}" "${SEED:=1234}" "${TENSOR_PARALLEL:=2}"

MODEL=(
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --seq-length "$SEQUENCE" --max-position-embeddings 40960 --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights
    --mtp-num-layers "$DEPTHS" --mtp-loss-scaling-factor 0.1
)
LAYOUT=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL" --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --bf16 --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$STEPS"
    --lr "$LR" --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta2 0.95 --init-method-std 0.02 --seed "$SEED" --recompute-activations
    --save-interval "$SAVE_INTERVAL" --log-interval 10 --eval-interval 1000 --eval-iters 16
)
DATA_FLAGS=(
    --data-path "$DATA" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --make-vocab-size-divisible-by 128 --no-create-attention-mask-in-dataloader
)
