# shellcheck shell=bash disable=SC2034  # the jobs read the arrays
# The shape of Moonlight-16B-A3B, a small DeepSeek-V3 (latent attention, 64 experts, 6 per token, 2 shared), with one
# MTP layer. Expert parallel over 8 ranks: use 8, 16, 32, ... GPUs. The norms' epsilon is 1e-6 instead of 1e-5, because
# transformers always uses 1e-6 inside latent attention; Megatron and vLLM use the configured value.
: "${DATA:=data/corpus}" "${TOKENIZER:=models/Moonlight-16B-A3B}" "${HF_MODEL:=models/Moonlight-16B-A3B}"
: "${FAMILY:=deepseek_v3}"
: "${DEPTHS:=1}" "${SEQUENCE:=4096}" "${MICRO_BATCH:=1}" "${GLOBAL_BATCH:=1024}"
: "${STEPS:=100000}" "${SAVE_INTERVAL:=500}"
: "${LR:=4e-4}" "${SEED:=1234}" "${EXPERT_PARALLEL:=8}"

MODEL=(
    --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16
    --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --kv-channels 128 --qk-layernorm
    --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
    --moe-layer-freq '([0]*1+[1]*26)'
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-topk-scaling-factor 2.446 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --seq-length "$SEQUENCE" --max-position-embeddings 8192
    --position-embedding-type rope --rope-type rope --rotary-base 50000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights
    --mtp-num-layers "$DEPTHS" --mtp-loss-scaling-factor 0.1
)
LAYOUT=(
    --expert-model-parallel-size "$EXPERT_PARALLEL" --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --bf16 --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$STEPS"
    --lr "$LR" --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta2 0.95 --init-method-std 0.02 --seed "$SEED" --recompute-activations
    --save-interval "$SAVE_INTERVAL" --log-interval 10 --eval-interval 1000 --eval-iters 16
)
DATA_FLAGS=(
    --data-path "$DATA" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --make-vocab-size-divisible-by 128 --no-create-attention-mask-in-dataloader
)
