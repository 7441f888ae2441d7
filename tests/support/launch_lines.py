"""Command lines that train models with Megatron-LM's own pretrain_gpt.py, without paths.

Shapes and flags come from Megatron-LM's examples, its functional tests and published recipes. Data is replaced by mock
data with a vocabulary of the same size; other machine-dependent flags are left out.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """The error for a command line that cannot train MTP layers, and the flags to add and remove to fix it."""

    says: str
    drop: str = ""
    add: str = ""


@dataclass(frozen=True)
class Line:
    """A launch line: number of GPUs, vocabulary size, flags, and number of added MTP layers.

    Megatron also needs the flags in `for_megatron`: it checks MTP layers before it applies an older flag.
    """

    gpus: int
    vocabulary: int
    flags: str
    depths: int = 1
    refused: Refusal | None = None
    for_megatron: str = ""

    @property
    def mended(self) -> str:
        """Return the flags fixed as the error asks."""
        if self.refused is None:
            return self.flags
        return f"{self.flags.replace(self.refused.drop or ' ', ' ')} {self.refused.add}"


_ADAM = "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --lr-decay-style cosine"
_LOGGED = "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10"
_BY_SAMPLES = f"""
    --train-samples 268554688 --lr 1.2e-5 --min-lr 1.2e-6 --lr-decay-samples 255126953 --lr-warmup-samples 162761
    {_ADAM} --bf16 --init-method-std 0.02 --exit-duration-in-mins 230 --eval-iters 32 --eval-interval 500
    --save-interval 500 --log-interval 1 --log-throughput --log-timers-to-tensorboard --log-memory-to-tensorboard
    --log-validation-ppl-to-tensorboard --manual-gc --manual-gc-interval 10 --distributed-timeout-minutes 60
    --no-mmap-bin-files --num-workers 6 --split 99,1,0 --dist-ckpt-strictness log_all --auto-detect-ckpt-format"""
_OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_LLAMA_LIKE = """
    --use-mcore-models --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0"""
_GPT3 = f"""
    --attention-backend auto --seq-length 2048 --max-position-embeddings 2048 --init-method-std 0.006 {_ADAM} --fp16
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 --train-iters 500000
    --split 949,50,1 {_LOGGED}"""
_LLAMA2 = f"""
    {_LLAMA_LIKE} --no-masked-softmax-fusion --use-flash-attn --seq-length 4096 --max-position-embeddings 4096
    --init-method-std 0.02 --train-iters 500000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2000 {_ADAM} --bf16
    --initial-loss-scale 65536 {_LOGGED}"""
_LATENT = """
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --mscale 1.0 --mscale-all-dim 1.0"""
_HYBRID = f"""
    --use-mcore-models --normalization RMSNorm --disable-bias-linear --position-embedding-type none
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --group-query-attention
    --kv-channels 128 --norm-epsilon 1e-5 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    --micro-batch-size 1 {_BY_SAMPLES} {_OVERLAPPED}"""
_SIGMOID_ROUTER = """
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32
    --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall"""
_SOFTMAX_ROUTER = """
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 --moe-grouped-gemm
    --moe-permute-fusion --moe-token-dispatcher-type alltoall"""
_DEEPSEEK_V3 = f"""
    {_LLAMA_LIKE} {_LATENT} {_SIGMOID_ROUTER} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 --norm-epsilon 1e-6
    --rotary-base 10000 --rotary-scaling-factor 40 --make-vocab-size-divisible-by 3232 --num-experts 256
    --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl native --no-create-attention-mask-in-dataloader
    --no-check-for-nan-in-loss-and-grad --enable-experimental"""
_FLEX = "--moe-token-dispatcher-type flex --moe-enable-deepep"
_BLOCKWISE = "--fp8-recipe blockwise --fp8-format e4m3"
_BF16_MOMENTS = """
    --use-precision-aware-optimizer --main-grads-dtype fp32 --main-params-dtype fp32 --exp-avg-dtype bf16
    --exp-avg-sq-dtype bf16"""
_DEEPSEEK_ON_H100 = f"""
    {_DEEPSEEK_V3} {_BY_SAMPLES} {_OVERLAPPED} --transformer-impl transformer_engine --moe-router-fusion
    --micro-batch-size 1 --global-batch-size 8192 --no-save-optim --mtp-loss-scaling-factor 0.1"""
_TWO_BY_EIGHT = f"""
    {_FLEX} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8
    --pipeline-model-parallel-layout Et|(tt|)*30mL --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --recompute-granularity selective --recompute-modules mla_up_proj mlp {_BLOCKWISE} {_BF16_MOMENTS}
    --moe-router-padding-for-fp8"""
_SIXTEEN_STAGES = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout Et*2|(tt|)*22t|(tt|)*7mL"""
_FOR_RL = """
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-distributed-optimizer
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash --micro-batch-size 1
    --global-batch-size 64 --bf16 --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.98 --train-iters 1000 --eval-iters 0 --eval-interval 1000 --log-interval 1"""
_LEARNED = Refusal("not supported with learned_absolute position embedding type", add="--position-embedding-type rope")
_OVERLAP, _DEFERRED = "--overlap-moe-expert-parallel-comm", "--defer-embedding-wgrad-compute"

LINES: dict[str, Line] = {
    "gpt3-345m": Line(
        8,
        50257,
        f"""--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 64
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --transformer-impl
        transformer_engine --async-save --ckpt-format torch_dist --use-persistent-ckpt-worker
        --attention-softmax-in-fp32 --no-gradient-accumulation-fusion --no-bias-gelu-fusion {_GPT3}""",
        refused=_LEARNED,
    ),
    "gpt3-857m": Line(
        8,
        50257,
        f"""--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 16
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2
        --recompute-activations {_GPT3}""",
        refused=_LEARNED,
    ),
    "gpt3-175b": Line(
        1024,
        50257,
        f"""--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --micro-batch-size 1 --global-batch-size 1536
        --rampup-batch-size 16 16 5859375 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 {_GPT3}""",
        refused=Refusal(
            "--rampup-batch-size was given, which Megatron 0.19 ignores",
            drop="--rampup-batch-size 16 16 5859375",
            add="--position-embedding-type rope",
        ),
    ),
    "llama2-7b": Line(
        16,
        32000,
        f"""--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --micro-batch-size 1
        --global-batch-size 256 --tensor-model-parallel-size 2 --use-distributed-optimizer {_LLAMA2}""",
    ),
    "llama2-7b-context-parallel": Line(
        32,
        32000,
        f"""--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --micro-batch-size 1
        --global-batch-size 128 --tensor-model-parallel-size 2 --context-parallel-size 4 --cp-comm-type p2p
        --sequence-parallel {_OVERLAPPED} {_LLAMA2} --seq-length 32768 --max-position-embeddings 32768""",
    ),
    "llama2-70b": Line(
        256,
        32000,
        f"""--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
        --num-query-groups 8 --micro-batch-size 1 --global-batch-size 1024 --tensor-model-parallel-size 8
        --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 5 --sequence-parallel
        --tp-comm-overlap {_OVERLAPPED} {_LLAMA2}""",
        depths=2,
    ),
    "llama3-8b-fp8": Line(
        8,
        128256,
        f"""{_LLAMA_LIKE} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
        --max-position-embeddings 8192 --rotary-base 1000000 --rotary-percent 1.0 --init-method-std 0.0134
        --attention-backend fused --apply-layernorm-1p --micro-batch-size 1 --global-batch-size 128
        --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015
        --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 {_ADAM} --bf16 --grad-reduce-in-bf16
        --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
        --exit-duration-in-mins 235 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
        --fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
        {_OVERLAPPED} --tiktoken-pattern v2 --no-create-attention-mask-in-dataloader --no-mmap-bin-files
        --num-workers 1 --split 99,1,0 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000
        --log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
        --distributed-timeout-minutes 60""",
    ),
    "llama3.1-405b": Line(
        1024,
        128256,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
        --num-attention-heads 128 --group-query-attention --num-query-groups 8 --seq-length 8192
        --max-position-embeddings 131072 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0
        --norm-epsilon 1e-5 --micro-batch-size 1 --global-batch-size 512 --tensor-model-parallel-size 8
        --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 1 --context-parallel-size 2
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --sequence-parallel
        --tp-comm-overlap {_OVERLAPPED} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
        {_DEFERRED} --wgrad-deferral-limit 22""",
        refused=Refusal(f"{_DEFERRED} was given with --mtp-num-layers", drop=_DEFERRED),
    ),
    "llama3.2-1b": Line(
        8,
        128256,
        f"""{_LLAMA_LIKE.replace("--untie-embeddings-and-output-weights", "")} {_BY_SAMPLES} --num-layers 16
        --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention
        --num-query-groups 8 --kv-channels 64 --seq-length 8192 --max-position-embeddings 131072
        --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32.0 --micro-batch-size 2
        --global-batch-size 256 {_OVERLAPPED}""",
        depths=2,
    ),
    "nemotron4-15b": Line(
        64,
        256000,
        f"""{_BY_SAMPLES} --use-mcore-models --normalization LayerNorm --apply-layernorm-1p --squared-relu
        --disable-bias-linear --untie-embeddings-and-output-weights --use-rotary-position-embeddings
        --no-position-embedding --rotary-percent 0.5 --rotary-base 10000 --no-rope-fusion --attention-dropout 0.0
        --hidden-dropout 0.0 --num-layers 32 --hidden-size 6144 --ffn-hidden-size 24576 --num-attention-heads 48
        --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 4096
        --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 384 --tensor-model-parallel-size 4
        --sequence-parallel {_OVERLAPPED}""",
        for_megatron="--position-embedding-type rope",
    ),
    "mixtral-8x7b": Line(
        8,
        32000,
        f"""{_LLAMA_LIKE} --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096
        --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --group-query-attention
        --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000
        --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
        --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000
        --lr-decay-iters 320000 --lr-warmup-iters 500 --min-lr 1.0e-5 {_ADAM} --bf16
        --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 8 --expert-model-parallel-size 2
        --use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval 1000
        --eval-iters 10 --no-load-optim --no-load-rng""",
    ),
    "mixtral-8x22b": Line(
        128,
        32000,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SOFTMAX_ROUTER} --transformer-impl transformer_engine --use-flash-attn
        --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 --group-query-attention
        --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --make-vocab-size-divisible-by 128
        --num-experts 8 --moe-router-topk 2 --moe-router-fusion --micro-batch-size 1 --global-batch-size 256
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 1
        --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --sequence-parallel --tp-comm-overlap
        {_OVERLAPPED} --no-ckpt-fully-parallel-save --finetune""",
        depths=2,
    ),
    "deepseek-v2-lite": Line(
        32,
        102400,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SOFTMAX_ROUTER} {_LATENT.replace("--q-lora-rank 1536", "")} --num-layers 27
        --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --kv-channels 16 --seq-length 4096
        --max-position-embeddings 163840 --rotary-base 10000 --rotary-scaling-factor 40 --num-experts 64
        --moe-layer-freq [0]+[1]*26 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
        --moe-router-topk 6 --moe-router-pre-softmax --micro-batch-size 1 --global-batch-size 512
        --expert-model-parallel-size 8 --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity
        {_OVERLAPPED}""",
    ),
    "deepseek-v3": Line(
        1024,
        129280,
        f"""{_DEEPSEEK_V3} {_BY_SAMPLES} --micro-batch-size 1 --global-batch-size 8192 --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 16 --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
        --pipeline-model-parallel-layout Et*3|(tt|)*29m|L --sequence-parallel --moe-router-fusion
        --recompute-granularity selective --recompute-modules mla_up_proj mlp {_OVERLAPPED}""",
    ),
    "deepseek-v3-uneven-stages": Line(
        256,
        129280,
        f"""{_DEEPSEEK_V3} {_BY_SAMPLES} --micro-batch-size 1 --global-batch-size 2048
        --pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 7
        --expert-model-parallel-size 32 --moe-token-dispatcher-type flex --moe-enable-deepep --fp8-format e4m3
        --fp8-recipe blockwise --fp8-param-gather --use-precision-aware-optimizer --main-grads-dtype fp32
        --main-params-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 {_OVERLAPPED}""",
    ),
    "deepseek-proxy": Line(
        16,
        50257,
        f"""{_LLAMA_LIKE} {_LATENT} {_SIGMOID_ROUTER} --num-layers 15 --moe-layer-freq ([0]*3+[1]*12)
        --pipeline-model-parallel-layout Et*3|(tt|)*6mL --hidden-size 1024 --ffn-hidden-size 4096
        --num-attention-heads 32 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096
        --rotary-base 10000 --rotary-scaling-factor 40 --make-vocab-size-divisible-by 3232 --norm-epsilon 1e-6
        --num-experts 32 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 --moe-router-topk 4
        --moe-router-pre-softmax --moe-router-group-topk 2 --moe-router-num-groups 4
        --moe-router-topk-scaling-factor 2.0 --attention-backend unfused --no-rope-fusion
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl native --manual-gc --manual-gc-interval 100
        --recompute-granularity selective --recompute-modules layernorm mla_up_proj mlp moe_act
        --mtp-loss-scaling-factor 0.1 --micro-batch-size 1 --global-batch-size 8 --train-iters 50 --exit-interval 50
        --lr 0.00015 --min-lr 1.0e-5 --lr-warmup-fraction .01 {_ADAM} --bf16 --init-method-std 0.02
        --log-num-zeros-in-grad --log-params-norm --eval-iters 32 --eval-interval 200 --save-interval 25
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4
        --expert-tensor-parallel-size 1 --use-distributed-optimizer --sequence-parallel {_OVERLAP}""",
    ),
    "kimi-k2": Line(
        512,
        163840,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_LATENT} {_SIGMOID_ROUTER} --num-layers 61 --hidden-size 7168
        --ffn-hidden-size 18432 --num-attention-heads 64 --kv-channels 64 --seq-length 4096
        --max-position-embeddings 131072 --rotary-base 50000 --rotary-scaling-factor 32 --no-rope-fusion
        --num-experts 384 --moe-layer-freq [0]+[1]*60 --moe-ffn-hidden-size 2048
        --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 1
        --moe-router-group-topk 1 --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.827
        --attention-softmax-in-fp32 --micro-batch-size 1 --global-batch-size 4096 --optimizer muon
        --muon-momentum 0.95 --pipeline-model-parallel-size 8 --decoder-last-pipeline-num-layers 5
        --tensor-model-parallel-size 8 --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
        --sequence-parallel --empty-unused-memory-level 2""",
        depths=2,
    ),
    "moonlight-16b-a3b": Line(
        64,
        163840,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_LATENT.replace("--q-lora-rank 1536", "")} {_SIGMOID_ROUTER} --num-layers 27
        --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16 --kv-channels 128 --seq-length 8192
        --max-position-embeddings 8192 --rotary-base 50000 --rotary-scaling-factor 1 --num-experts 64
        --moe-layer-freq [0]+[1]*26 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
        --moe-router-topk 6 --moe-router-topk-scaling-factor 2.446 --micro-batch-size 1 --global-batch-size 1024
        --expert-model-parallel-size 8 {_OVERLAPPED}""",
    ),
    "qwen2.5-7b": Line(
        16,
        151936,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} --add-qkv-bias --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944
        --num-attention-heads 28 --group-query-attention --num-query-groups 4 --seq-length 8192
        --max-position-embeddings 32768 --rotary-base 1000000 --norm-epsilon 1e-6 --micro-batch-size 1
        --global-batch-size 512 --tensor-model-parallel-size 4 --sequence-parallel {_OVERLAPPED}
        --reset-position-ids --reset-attention-mask --eod-mask-loss""",
        depths=2,
    ),
    "qwen3-0.6b": Line(
        8,
        151936,
        f"""{_LLAMA_LIKE.replace("--untie-embeddings-and-output-weights", "")} {_BY_SAMPLES} --qk-layernorm
        --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --group-query-attention
        --num-query-groups 8 --kv-channels 128 --seq-length 4096 --max-position-embeddings 40960
        --rotary-base 1000000 --rotary-percent 1.0 --norm-epsilon 1e-6 --no-bias-swiglu-fusion --no-rope-fusion
        --no-masked-softmax-fusion --micro-batch-size 4 --global-batch-size 256 {_OVERLAPPED}""",
        depths=2,
    ),
    "qwen3-30b-a3b": Line(
        32,
        151936,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SOFTMAX_ROUTER} --qk-layernorm --num-layers 48 --hidden-size 2048
        --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention --num-query-groups 4
        --kv-channels 128 --seq-length 4096 --max-position-embeddings 40960 --rotary-base 1000000 --norm-epsilon 1e-6
        --make-vocab-size-divisible-by 1187 --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8
        --micro-batch-size 1 --global-batch-size 256 --expert-model-parallel-size 8
        --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 {_OVERLAPPED}
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1""",
    ),
    "qwen3-235b-a22b": Line(
        256,
        151936,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SOFTMAX_ROUTER} --qk-layernorm --num-layers 94 --hidden-size 4096
        --ffn-hidden-size 12288 --num-attention-heads 64 --group-query-attention --num-query-groups 4
        --kv-channels 128 --seq-length 4096 --max-position-embeddings 40960 --rotary-percent 1.0
        --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1 --norm-epsilon 1e-6
        --make-vocab-size-divisible-by 1187 --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8
        --moe-router-fusion --micro-batch-size 1 --global-batch-size 2048 --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 4 --expert-model-parallel-size 32
        --expert-tensor-parallel-size 1 --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split --sequence-parallel --no-create-attention-mask-in-dataloader
        --use-flash-attn --cross-entropy-loss-fusion --cross-entropy-fusion-impl native --enable-experimental
        {_OVERLAPPED}""",
    ),
    "glm4.5-air": Line(
        64,
        151552,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SIGMOID_ROUTER} --add-qkv-bias --num-layers 46 --hidden-size 4096
        --ffn-hidden-size 10944 --num-attention-heads 96 --group-query-attention --num-query-groups 8
        --kv-channels 128 --seq-length 8192 --max-position-embeddings 131072 --rotary-percent 0.5
        --rotary-base 1000000 --no-rope-fusion --norm-epsilon 1e-5 --num-experts 128 --moe-layer-freq [0]*1+[1]*45
        --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408 --moe-router-topk 8
        --moe-router-pre-softmax --moe-router-topk-scaling-factor 1.0 --micro-batch-size 1 --global-batch-size 256
        --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 8
        --expert-tensor-parallel-size 1 --sequence-parallel {_OVERLAPPED}""",
    ),
    "glm4.5": Line(
        256,
        151552,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SIGMOID_ROUTER} --add-qkv-bias --qk-layernorm --num-layers 92
        --hidden-size 5120 --ffn-hidden-size 12288 --num-attention-heads 96 --group-query-attention
        --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 131072
        --rotary-percent 0.5 --rotary-base 1000000 --no-rope-fusion --norm-epsilon 1e-5 --num-experts 160
        --moe-layer-freq [0]*3+[1]*89 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536
        --moe-router-topk 8 --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5 --micro-batch-size 1
        --global-batch-size 1024 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
        --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --context-parallel-size 2
        --sequence-parallel {_OVERLAPPED} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
        --use-precision-aware-optimizer""",
        depths=2,
    ),
    "gpt-oss-20b": Line(
        32,
        201088,
        f"""{_BY_SAMPLES} --use-mcore-models --no-masked-softmax-fusion --untie-embeddings-and-output-weights
        --no-rope-fusion --normalization RMSNorm --position-embedding-type rope --num-layers 24 --hidden-size 2880
        --ffn-hidden-size 2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64
        --num-experts 32 --moe-ffn-hidden-size 2880 --moe-router-dtype fp32 --moe-router-topk 4
        --moe-aux-loss-coeff 0.0 --moe-token-dispatcher-type alltoall --moe-router-score-function softmax
        --moe-router-load-balancing-type aux_loss --seq-length 4096 --max-position-embeddings 40960
        --make-vocab-size-divisible-by 128 --rotary-percent 1.0 --rotary-base 150000 --no-bias-gelu-fusion
        --sequence-parallel --no-bias-dropout-fusion --quick-geglu --glu-linear-offset 1.0 --softmax-type learnable
        --window-attn-skip-freq 2 --activation-func-clamp-value 7.0 --window-size 127,0 --micro-batch-size 1
        --global-batch-size 128 --tensor-model-parallel-size 2 --expert-model-parallel-size 4
        --expert-tensor-parallel-size 1""",
    ),
    "mimo-7b": Line(
        64,
        151680,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} --add-qkv-bias --num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008
        --num-attention-heads 32 --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings
        --norm-epsilon 1e-05 --rotary-base 640000 --seq-length 32768 --max-position-embeddings 32768
        --micro-batch-size 1 --global-batch-size 640 --tensor-model-parallel-size 4 --context-parallel-size 2
        --sequence-parallel {_OVERLAPPED}""",
    ),
    "nemotron-h-8b": Line(
        16,
        131072,
        f"""{_HYBRID} --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-/*-
        --squared-relu --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --num-query-groups 8
        --mamba-num-heads 128 --seq-length 8192 --max-position-embeddings 8192 --global-batch-size 768
        --tensor-model-parallel-size 2 --sequence-parallel""",
    ),
    "nemotron3-nano-30b-a3b": Line(
        64,
        131072,
        f"""{_HYBRID} {_SIGMOID_ROUTER}
        --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*|EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME/*E/*E
        --squared-relu --hidden-size 2688 --ffn-hidden-size 1856 --num-attention-heads 32 --num-query-groups 2
        --mamba-num-heads 64 --num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856
        --moe-shared-expert-intermediate-size 3712 --moe-router-topk-scaling-factor 2.5 --seq-length 8192
        --max-position-embeddings 262144 --global-batch-size 3072 --pipeline-model-parallel-size 2
        --expert-model-parallel-size 8""",
        depths=2,
    ),
    "qwen3-next-80b-a3b-hybrid": Line(
        64,
        151936,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SOFTMAX_ROUTER} --hybrid-layer-pattern {12 * "GEGEGE*E"}/*E
        --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --group-query-attention
        --num-query-groups 2 --kv-channels 256 --seq-length 4096 --max-position-embeddings 262144 --norm-epsilon 1e-6
        --apply-layernorm-1p --qk-layernorm --attention-output-gate --rotary-percent 0.25 --rotary-base 10000000
        --no-rope-fusion --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128
        --linear-num-key-heads 16 --linear-num-value-heads 32 --num-experts 512 --moe-ffn-hidden-size 512
        --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-router-topk 10
        --make-vocab-size-divisible-by 1187 --micro-batch-size 1 --global-batch-size 512
        --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --enable-experimental {_OVERLAPPED}""",
    ),
    "qwen3.5-35b-a3b": Line(
        64,
        248320,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SOFTMAX_ROUTER} --hybrid-layer-pattern {10 * "GEGEGE*E"}/*E
        --hidden-size 2048 --ffn-hidden-size 512 --num-attention-heads 16 --group-query-attention
        --num-query-groups 2 --kv-channels 256 --seq-length 4096 --max-position-embeddings 262144 --norm-epsilon 1e-6
        --apply-layernorm-1p --qk-layernorm --attention-output-gate --rotary-percent 0.25 --rotary-base 10000000
        --no-rope-fusion --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128
        --linear-num-key-heads 16 --linear-num-value-heads 32 --num-experts 256 --moe-ffn-hidden-size 512
        --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-router-topk 8
        --micro-batch-size 1 --global-batch-size 512 --expert-model-parallel-size 16
        --expert-tensor-parallel-size 1 --enable-experimental {_OVERLAPPED}""",
    ),
    "qwen3.5-9b": Line(
        32,
        248320,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} --hybrid-layer-pattern {8 * "G-G-G-*-"}/*-
        --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 16 --group-query-attention
        --num-query-groups 4 --kv-channels 256 --seq-length 4096 --max-position-embeddings 262144 --norm-epsilon 1e-6
        --apply-layernorm-1p --qk-layernorm --attention-output-gate --rotary-percent 0.25 --rotary-base 10000000
        --no-rope-fusion --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128
        --linear-num-key-heads 16 --linear-num-value-heads 32 --micro-batch-size 1 --global-batch-size 512
        --tensor-model-parallel-size 4 --sequence-parallel --enable-experimental {_OVERLAPPED}""",
    ),
    "qwen3-next-80b-a3b": Line(
        64,
        151936,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SOFTMAX_ROUTER} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120
        --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256 --seq-length 4096
        --max-position-embeddings 262144 --norm-epsilon 1e-6 --apply-layernorm-1p --qk-layernorm
        --apply-wd-to-qk-layernorm --attention-output-gate --rotary-percent 0.25 --rotary-base 10000000
        --rotary-seq-len-interpolation-factor 1 --no-rope-fusion --experimental-attention-variant gated_delta_net
        --linear-attention-freq 4 --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128
        --linear-num-key-heads 16 --linear-num-value-heads 32 --num-experts 512 --moe-ffn-hidden-size 512
        --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-router-topk 10
        --make-vocab-size-divisible-by 1187 --micro-batch-size 1 --global-batch-size 512
        --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --enable-experimental {_OVERLAPPED}""",
        refused=Refusal(
            "--experimental-attention-variant gated_delta_net was given with --mtp-num-layers",
            drop="--experimental-attention-variant gated_delta_net",
            add=f"--hybrid-layer-pattern {12 * 'GEGEGE*E'}/*E",
        ),
    ),
    "deepseek-v3-h100-overlapped-experts": Line(
        1024,
        129280,
        f"{_DEEPSEEK_ON_H100} {_TWO_BY_EIGHT} {_OVERLAP} --delay-wgrad-compute",
        refused=Refusal(f"{_OVERLAP} --delay-wgrad-compute was given", drop="--delay-wgrad-compute"),
    ),
    "deepseek-v3-h100": Line(1024, 129280, f"{_DEEPSEEK_ON_H100} {_TWO_BY_EIGHT}"),
    "deepseek-v3-h100-offloaded": Line(
        256,
        129280,
        f"""{_DEEPSEEK_ON_H100} {_SIXTEEN_STAGES} {_FLEX} --expert-model-parallel-size 16
        --expert-tensor-parallel-size 1 --optimizer-cpu-offload --optimizer-offload-fraction 1.0
        --use-precision-aware-optimizer --overlap-cpu-optimizer-d2h-h2d --recompute-granularity selective
        --recompute-modules mla_up_proj mlp moe_act layernorm {_BLOCKWISE}""",
    ),
    "deepseek-v3-graphs": Line(
        1024,
        129280,
        f"""{_DEEPSEEK_ON_H100} {_SIXTEEN_STAGES} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep
        --expert-model-parallel-size 64 --cuda-graph-impl transformer_engine
        --cuda-graph-scope attn moe_router moe_preprocess --te-rng-tracker --cuda-graph-warmup-steps 3""",
    ),
    "deepseek-proxy-hybridep": Line(
        64,
        129280,
        f"""{_DEEPSEEK_ON_H100} --num-layers 16 --moe-layer-freq ([0]*3+[1]*13) --tensor-model-parallel-size 2
        --sequence-parallel --pipeline-model-parallel-size 4 --expert-model-parallel-size 16
        --expert-tensor-parallel-size 1 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep
        --pipeline-model-parallel-layout Et*3|(tt|)*5t*2|tmL --recompute-granularity selective
        --recompute-modules moe_act mlp""",
    ),
    "qwen3-235b-a22b-deepep": Line(
        256,
        151936,
        f"""{_LLAMA_LIKE} {_BY_SAMPLES} {_SOFTMAX_ROUTER} {_FLEX} {_OVERLAPPED} --transformer-impl transformer_engine
        --qk-layernorm --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64
        --group-query-attention --num-query-groups 4 --kv-channels 128 --seq-length 4096
        --max-position-embeddings 40960 --rotary-base 1000000 --norm-epsilon 1e-6 --make-vocab-size-divisible-by 1187
        --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-router-fusion --micro-batch-size 1
        --global-batch-size 8192 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8
        --num-virtual-stages-per-pipeline-rank 4 --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
        --recompute-granularity selective --recompute-modules moe_act layernorm
        --cuda-graph-impl transformer_engine --cuda-graph-scope moe_router moe_preprocess --enable-experimental""",
    ),
    "glm4.5-uneven-stages": Line(
        256,
        151552,
        f"""{_LLAMA_LIKE} {_FOR_RL} {_SIGMOID_ROUTER} {_FLEX} --add-qkv-bias --qk-layernorm --num-layers 92
        --hidden-size 5120 --ffn-hidden-size 12288 --num-attention-heads 96 --group-query-attention
        --num-query-groups 8 --kv-channels 128 --seq-length 4096 --max-position-embeddings 131072
        --rotary-percent 0.5 --rotary-base 1000000 --norm-epsilon 1e-5 --num-experts 160
        --moe-layer-freq ([0]*3+[1]*89) --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536
        --moe-router-topk 8 --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5
        --moe-token-drop-policy probs --tensor-model-parallel-size 8 --sequence-parallel
        --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 23 --context-parallel-size 2
        --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --optimizer-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer""",
    ),
    "mimo-7b-for-rl": Line(
        8,
        151680,
        f"""{_LLAMA_LIKE} {_FOR_RL} --add-qkv-bias --num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008
        --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --norm-epsilon 1e-5
        --rotary-base 640000 --seq-length 4096 --max-position-embeddings 32768 --tensor-model-parallel-size 2
        --sequence-parallel --mtp-loss-scaling-factor 0.2""",
    ),
    "nemotron-fp8-by-tensor": Line(
        16,
        50257,
        f"""{_BY_SAMPLES} {_OVERLAPPED} --use-mcore-models --transformer-impl transformer_engine --num-layers 32
        --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention
        --num-query-groups 8 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096
        --position-embedding-type rope --rotary-percent 0.5 --squared-relu --untie-embeddings-and-output-weights
        --disable-bias-linear --normalization LayerNorm --apply-layernorm-1p --attention-dropout 0.0
        --hidden-dropout 0.0 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
        --num-layers-per-virtual-pipeline-stage 8 --tp-comm-overlap --fp8-format hybrid --fp8-recipe tensorwise
        --fp8-param-gather --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl native --micro-batch-size 4 --global-batch-size 1152
        --attention-backend fused""",
    ),
}
