# shellcheck shell=bash disable=SC2034  # the jobs read the arrays
# The shape of Nemotron-H-8B (arXiv:2504.03624): 24 Mamba-2, 24 MLP and 4 attention layers, and one MTP layer of
# attention and MLP. Tensor parallel over 2 ranks: use 2, 4, 8, ... GPUs, with mamba_ssm and causal_conv1d.
: "${DATA:=data/corpus}" "${TOKENIZER:=models/Nemotron-H-8B-Base-8K}" "${HF_MODEL:=models/Nemotron-H-8B-Base-8K}"
: "${DEPTHS:=1}" "${SEQUENCE:=8192}" "${MICRO_BATCH:=1}" "${GLOBAL_BATCH:=768}"
: "${STEPS:=100000}" "${SAVE_INTERVAL:=500}"
: "${LR:=8e-4}" "${SEED:=1234}" "${TENSOR_PARALLEL:=2}"

PATTERN='M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-'
for ((depth = 0; depth < DEPTHS; depth++)); do
    PATTERN+='/*-'
done
MODEL=(
    --hybrid-layer-pattern "$PATTERN" --hidden-size 4096 --ffn-hidden-size 21504 --squared-relu
    --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length "$SEQUENCE" --max-position-embeddings 8192 --position-embedding-type none
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights
    --mtp-loss-scaling-factor 0.1
)
LAYOUT=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL" --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --bf16 --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$STEPS"
    --lr "$LR" --min-lr 8e-6 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 10000
    --lr-warmup-iters 1000 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta2 0.95 --init-method-std 0.014 --seed "$SEED"
    --save-interval "$SAVE_INTERVAL" --log-interval 10 --eval-interval 1000 --eval-iters 16
)
DATA_FLAGS=(
    --data-path "$DATA" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --make-vocab-size-divisible-by 128 --no-create-attention-mask-in-dataloader
)
