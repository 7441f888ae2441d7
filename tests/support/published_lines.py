"""Launch lines that projects publish, for `--dry-run` on a machine without GPUs: source, ranks, flags, expected output.

Shell variables have the values that the file sets or asks for. Paths, tokenizers, data and logging services are
removed, and mock data is used. slime's files only describe a model, so `FEW` trains it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A line.

    Attributes:
        where: repository and file.
        ranks: number of ranks.
        flags: as published.
        says: a line of the plan, or of the error.
        refused: whether it is an error.
    """

    where: str
    ranks: int
    flags: str
    says: str
    refused: bool = False


FEW = """--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1e-5 --eval-interval 100
    --eval-iters 1 --bf16 --mtp-num-layers 1"""
_MODELZOO = """--distributed-timeout-minutes 60 --context-parallel-size 1 --expert-tensor-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models --sequence-parallel
    --use-flash-attn --disable-bias-linear --micro-batch-size 1 --manual-gc --transformer-impl transformer_engine
    --seq-length 4096 --no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-workers 6 --swiglu
    --untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6
    --qk-layernorm --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1
    --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --moe-router-topk 8 --moe-grouped-gemm
    --moe-router-dtype fp32 --moe-permute-fusion --moe-router-force-load-balancing --eval-iters 32
    --auto-detect-ckpt-format --dist-ckpt-strictness log_all --init-method-std 0.02 --log-timers-to-tensorboard
    --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-throughput --log-interval 1 --bf16"""
_DEEPSEEK = """--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --v-head-dim 128 --rotary-base 10000
    --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58)
    --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-router-load-balancing-type seq_aux_loss --moe-router-group-topk 4 --moe-router-num-groups 8
    --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"""
_MODELZOO_DEEPSEEK = f"""{_MODELZOO} {_DEEPSEEK} --train-samples 585937500 --exit-duration-in-mins 220 --no-save-optim
    --no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
    --manual-gc-interval 10 --kv-channels 128 --max-position-embeddings 4096 --make-vocab-size-divisible-by 3232
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --lr-decay-samples 584765624 --lr-warmup-samples 1536000
    --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --moe-aux-loss-coeff 1e-4 --moe-router-bias-update-rate 1e-3
    --moe-router-fusion --eval-interval 200 --no-load-optim --no-load-rng --save-interval 500 --logging-level 40
    --enable-experimental --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --vocab-size 129280"""
_MODELZOO_QWEN = f"""{_MODELZOO} --train-samples 268554688 --exit-duration-in-mins 230 --manual-gc-interval 5
    --rotary-percent 1.0 --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1 --group-query-attention
    --num-query-groups 4 --kv-channels 128 --max-position-embeddings 40960 --make-vocab-size-divisible-by 1187
    --lr-decay-samples 255126953 --lr-warmup-samples 162761 --lr 1.2e-4 --min-lr 1.2e-5 --num-experts 128
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --eval-interval 500 --vocab-size 151936
    --save-interval 500 --mtp-num-layers 1"""
_PAI = f"""{_DEEPSEEK} --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0 --init-method-std 0.008 --attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 5000
    --lr-warmup-iters 50 --train-iters 5000 --micro-batch-size 1 --global-batch-size 64 --seq-length 4096
    --max-position-embeddings 163840 --log-interval 1 --log-throughput --eval-interval 10000 --eval-iters 10
    --save-interval 500 --tensorboard-queue-size 1 --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --context-parallel-size 1 --no-load-optim
    --no-load-rng --num-workers 8 --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --use-rotary-position-embeddings --no-rope-fusion --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear --no-save-optim --kv-channels 128 --qk-layernorm
    --ckpt-format torch --transformer-impl transformer_engine --no-masked-softmax-fusion --use-rope-scaling
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-topk 8 --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --moe-shared-expert-overlap --moe-router-bias-update-rate 0.001
    --moe-aux-loss-coeff 0.001 --bf16 --use-distributed-optimizer --decoder-first-pipeline-num-layers 1
    --attention-backend auto --vocab-size 129280"""
_SLIME_MIMO = """--swiglu --num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias
    --normalization RMSNorm --norm-epsilon 1e-05 --rotary-base 640000 --vocab-size 151680
    --untie-embeddings-and-output-weights --max-position-embeddings 32768 --tensor-model-parallel-size 2"""
_SLIME_QWEN3 = """--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128
    --qk-layernorm --max-position-embeddings 40960"""
_SLIME_SIGMOID = """--moe-grouped-gemm --moe-permute-fusion --moe-router-score-function sigmoid
    --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --disable-bias-linear
    --swiglu --untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm
    --no-rope-fusion --moe-token-dispatcher-type alltoall"""
_SLIME_GLM = f"""{_SLIME_SIGMOID} --moe-layer-freq [0]*1+[1]*45 --num-experts 128
    --moe-shared-expert-intermediate-size 1408 --moe-router-topk 8 --moe-ffn-hidden-size 1408
    --moe-router-topk-scaling-factor 1.0 --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944
    --num-attention-heads 96 --group-query-attention --num-query-groups 8 --kv-channels 128 --add-qkv-bias
    --no-position-embedding --vocab-size 151552 --rotary-base 1000000 --rotary-percent 0.5
    --max-position-embeddings 131072 --expert-model-parallel-size 8"""
_SLIME_FLASH = f"""{_SLIME_SIGMOID} --moe-layer-freq [0]*1+[1]*46 --num-experts 64
    --moe-shared-expert-intermediate-size 1536 --moe-router-topk 4 --moe-ffn-hidden-size 1536
    --moe-router-topk-scaling-factor 1.8 --make-vocab-size-divisible-by 64 --num-layers 47 --hidden-size 2048
    --ffn-hidden-size 10240 --num-attention-heads 20 --add-qkv-bias --no-position-embedding --qk-layernorm
    --multi-latent-attention --q-lora-rank 768 --kv-lora-rank 512 --qk-head-dim 192 --v-head-dim 256 --kv-channels 192
    --qk-pos-emb-head-dim 64 --vocab-size 154880 --rotary-base 1000000 --max-position-embeddings 202752"""
_SLIME_MOONLIGHT = f"""{_SLIME_SIGMOID} --moe-layer-freq [0]*1+[1]*26 --num-experts 64
    --moe-shared-expert-intermediate-size 2816 --moe-router-topk 6 --moe-ffn-hidden-size 1408
    --moe-router-topk-scaling-factor 2.446 --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264
    --num-attention-heads 16 --kv-channels 128 --norm-epsilon 1e-5 --rotary-percent 1.0 --multi-latent-attention
    --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --rotary-scaling-factor 1 --rotary-base 50000 --vocab-size 163840 --max-position-embeddings 8192"""
_SLIME_NEMOTRON = """--num-layers 52 --hidden-size 2688 --ffn-hidden-size 1856 --num-attention-heads 32
    --group-query-attention --num-query-groups 2 --kv-channels 128 --normalization RMSNorm
    --position-embedding-type none --disable-bias-linear --squared-relu --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 128 --mamba-num-heads 64 --mamba-head-dim 64 --mamba-state-dim 128
    --mamba-num-groups 8 --num-experts 128 --moe-ffn-hidden-size 1856 --moe-router-topk 6
    --moe-shared-expert-intermediate-size 3712 --moe-grouped-gemm --moe-router-load-balancing-type seq_aux_loss
    --moe-token-dispatcher-type alltoall --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --vocab-size 131072 --max-position-embeddings 8192"""
_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

TE, DEEP_EP, HYBRID_EP = (
    f"planned as for a machine with {libraries}"
    for libraries in ("Transformer Engine", "Transformer Engine and DeepEP", "Transformer Engine and HybridEP")
)
PUBLISHED = {
    "deepseek-v3, 1024 H100": Published(
        "Megatron-MoE-ModelZoo, best_practice/DeepSeekV3/run.sh",
        1024,
        f"""{_MODELZOO_DEEPSEEK} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8
        --expert-model-parallel-size 64 --global-batch-size 8192 --moe-token-dispatcher-type flex --moe-enable-deepep
        --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --recompute-granularity selective
        --recompute-modules mla_up_proj mlp --pipeline-model-parallel-layout Et|(tt|)*30mL""",
        DEEP_EP,
    ),
    "deepseek-v3, 256 GB200": Published(
        "Megatron-MoE-ModelZoo, best_practice/deepseek-v3/run_deepseek_v3_gb200.sh",
        256,
        f"""{_MODELZOO_DEEPSEEK} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
        --expert-model-parallel-size 64 --global-batch-size 8192 --moe-token-dispatcher-type flex
        --moe-flex-dispatcher-backend hybridep --fp8-format e4m3 --fp8-recipe mxfp8 --recompute-granularity selective
        --recompute-modules mlp --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess
        --te-rng-tracker --cuda-graph-warmup-steps 0 --pipeline-model-parallel-layout Et*4|(tttt|)*14tmL""",
        HYBRID_EP,
    ),
    "deepseek-v3, Pai": Published(
        "Pai-Megatron-Patch, examples/deepseek_v3/run_mcore_deepseek.sh",
        128,
        f"""{_PAI} --qk-head-dim 128 --qk-pos-emb-head-dim 64 --mtp-num-layers 1""",
        "layout of 128 ranks: data 8, tensor 1, pipeline 16, context 1, expert 8",
    ),
    "deepseek-v3, Pai's own flags": Published(
        "Pai-Megatron-Patch, examples/deepseek_v3/run_mcore_deepseek.sh",
        128,
        f"""{_PAI} --qk-nope-head-dim 128 --qk-rope-head-dim 64 --use-multi-token-prediction --num-mtp-predictor 1""",
        "unrecognized arguments: --qk-nope-head-dim 128 --qk-rope-head-dim 64 --use-multi-token-prediction",
        refused=True,
    ),
    "qwen3-30b-a3b": Published(
        "Megatron-MoE-ModelZoo, model_configs/benchmarking/Qwen3-30B-A3B.yaml",
        32,
        f"""{_MODELZOO_QWEN} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
        --moe-ffn-hidden-size 768 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
        --expert-model-parallel-size 8 --global-batch-size 256 --moe-token-dispatcher-type alltoall""",
        TE,
    ),
    "qwen3-235b-a22b": Published(
        "Megatron-MoE-ModelZoo, best_practice/qwen3/run_h100_235b.sh",
        256,
        f"""{_MODELZOO_QWEN} --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64
        --moe-ffn-hidden-size 1536 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8
        --expert-model-parallel-size 32 --global-batch-size 2048 --moe-token-dispatcher-type flex --moe-enable-deepep
        --recompute-granularity selective --recompute-modules moe_act layernorm
        --overlap-moe-expert-parallel-comm --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 4""",
        DEEP_EP,
    ),
    "qwen3-4b": Published("slime, scripts/models/qwen3-4B.sh", 8, f"{_SLIME_QWEN3} {FEW}", "layout of 8 ranks"),
    "mimo-7b": Published("slime, scripts/models/mimo-7B-rl.sh", 8, f"{_SLIME_MIMO} {FEW}", "layout of 8 ranks"),
    "glm-4.5-air": Published("slime, scripts/models/glm4.5-106B-A12B.sh", 64, f"{_SLIME_GLM} {FEW}", TE),
    "glm-4.7-flash": Published("slime, scripts/models/glm4.7-30B-A3B.sh", 8, f"{_SLIME_FLASH} {FEW}", TE),
    "moonlight": Published("slime, scripts/models/moonlight.sh", 8, f"{_SLIME_MOONLIGHT} {FEW}", TE),
    "nemotron-3-nano": Published(
        "slime, scripts/models/nemotron-nano-30B-A3B.sh",
        8,
        f"""{_SLIME_NEMOTRON} {FEW.replace("--mtp-num-layers 1", "")} --hybrid-layer-pattern {_NEMOTRON}/*E""",
        "layout of 8 ranks",
    ),
    "nemotron-3-nano, older pattern": Published(
        "slime, scripts/models/nemotron-nano-30B-A3B.sh",
        8,
        f"{_SLIME_NEMOTRON} {FEW} --hybrid-override-pattern {_NEMOTRON}",
        "--hybrid-override-pattern is deprecated; give --hybrid-layer-pattern",
        refused=True,
    ),
    "deepseek-v3 proxy": Published(
        "Megatron-LM, tests/functional_tests/test_cases/mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release",
        64,
        f"""{_MODELZOO_DEEPSEEK.replace("--num-layers 61", "--num-layers 14").replace("*58)", "*11)")}
        --num-experts 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
        --pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL --expert-model-parallel-size 16 --global-batch-size 512
        --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-pre-softmax
        --exit-interval 47683""",
        HYBRID_EP,
    ),
}
