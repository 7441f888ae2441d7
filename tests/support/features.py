"""Megatron's features in runs with MTP layers: tested ones, and ones that could not be tested. Plain data.

`test_features.py` compares every row of `TRIED` with the same run without the flags; docs/reference/features.md shows
both tables.
"""

from dataclasses import dataclass

_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type alltoall"
)
_SHARDED = "--use-distributed-optimizer"
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_INTERLEAVED = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
_DISPATCHED = f"{_EXPERTS} --expert-model-parallel-size 2 --mtp-num-layers 1 --bf16 --global-batch-size 8"
SETUPS = {"DISPATCHED": _DISPATCHED, "EXPERTS": _EXPERTS, "STAGES": _INTERLEAVED, "RECOMPUTED": _RECOMPUTED}
"""Names that the page uses for flags shared by several features; a longer one comes before its parts."""


@dataclass(frozen=True)
class Tried:
    """A feature that was run for three steps, with and without its flags.

    Attributes:
        flags: the feature's flags.
        processes: number of processes of both runs.
        both: additional flags of both runs; {folder} is a folder per run.
        apart: largest allowed difference of losses, in nats.
    """

    flags: str
    processes: int = 1
    both: str = ""
    apart: float = 1e-6


TRIED = (
    Tried("--overlap-grad-reduce", 2),
    Tried("--overlap-grad-reduce --overlap-param-gather", 2, _SHARDED),
    Tried("--ddp-num-buckets 3 --overlap-grad-reduce", 2),
    Tried("--ddp-bucket-size 1000 --overlap-grad-reduce", 2),
    Tried("--ddp-pad-buckets-for-high-nccl-busbw", 2, _SHARDED),
    Tried("--ddp-reduce-scatter-with-fp32-accumulation", 2, _SHARDED),
    Tried("--ddp-average-in-collective", 2),
    Tried("--no-align-param-gather", 2, _SHARDED),
    Tried("--create-all-gather-group", 2, _SHARDED),
    Tried("--disable-gloo-process-groups", 2, _SHARDED),
    Tried("--check-weight-hash-across-dp-replicas-interval 1", 2),
    Tried("--grad-reduce-in-bf16", 2, "--bf16", apart=1e-3),
    Tried("--accumulate-allreduce-grads-in-fp32", 2, "--bf16"),
    Tried("--fp16-lm-cross-entropy", both="--fp16"),
    Tried("--cross-entropy-loss-fusion", apart=1e-4),
    Tried(_RECOMPUTED),
    Tried(f"--distribute-saved-activations {_RECOMPUTED}", 2, "--tensor-model-parallel-size 2"),
    Tried("--recompute-granularity selective --recompute-modules core_attn mlp"),
    Tried("--moe-layer-recompute", both=_EXPERTS),
    Tried(
        "--moe-shared-expert-overlap",
        2,
        f"{_EXPERTS} --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 32",
    ),
    Tried("--overlap-moe-expert-parallel-comm", 2, _DISPATCHED, apart=1e-4),
    Tried("--overlap-moe-expert-parallel-comm", 4, f"{_DISPATCHED} {_INTERLEAVED}", apart=1e-4),
    Tried("--moe-expert-capacity-factor 4.0", both=_EXPERTS),
    Tried("--moe-enable-routing-replay", both=_EXPERTS),
    Tried("--moe-per-layer-logging", both=_EXPERTS),
    Tried("--overlap-p2p-communication-warmup-flush", 2, _INTERLEAVED),
    Tried("--microbatch-group-size-per-virtual-pipeline-stage 2", 2, f"{_INTERLEAVED} --global-batch-size 8"),
    Tried("--use-tp-pp-dp-mapping", 4, "--tensor-model-parallel-size 2"),
    Tried("--deterministic-mode", both="--bf16"),
    Tried("--mlp-chunks-for-training 2"),
    Tried("--async-save", both="--save {folder} --save-interval 2"),
    Tried("--save-wgrads-interval 1", both="--save {folder} --save-interval 9"),
    Tried("--save-params-interval 1", both="--save {folder} --save-interval 9"),
    Tried(
        "--non-persistent-save-interval 1 --non-persistent-ckpt-type global", both="--save {folder} --save-interval 2"
    ),
    Tried("--rerun-mode validate_results"),
    Tried("--check-for-spiky-loss --check-for-large-grads"),
    Tried("--log-params-norm --log-num-zeros-in-grad"),
    Tried("--manual-gc --manual-gc-interval 1"),
)

FIRST = (16,)
"""Indices of the first tier's rows: split activations."""

NEEDS_TE, NEEDS_CUDA, NEEDS_PACKAGE = "it needs Transformer Engine", "it needs a CUDA device", "it needs the package "

UNTRIED = {
    "--fp8-format": NEEDS_TE,
    "--fp8-param-gather": NEEDS_TE,
    "--fp4-format": NEEDS_TE,
    "--fp4-param-gather": NEEDS_TE,
    "--first-last-layers-bf16": f"{NEEDS_TE}; the MTP layers count as layers in the middle",
    "--te-precision-config-file": NEEDS_TE,
    "--reuse-grad-buf-for-mxfp8-param-ag": NEEDS_TE,
    "--use-precision-aware-optimizer": f"{NEEDS_TE} for its optimizer",
    "--optimizer-cpu-offload": NEEDS_CUDA,
    "--cpu-offloading-num-layers": f"{NEEDS_TE}; only layers of the trunk are offloaded",
    "--fine-grained-activation-offloading": NEEDS_TE,
    "--cuda-graph-impl local": NEEDS_CUDA,
    "--cuda-graph-impl transformer_engine": f"{NEEDS_CUDA}; MTP layers with experts run outside of graphs",
    "--optimizer-cuda-graph": NEEDS_CUDA,
    "--tp-comm-overlap": NEEDS_TE,
    "--tensor-parallel-num-weight-shards": NEEDS_TE,
    "--expert-tensor-parallel-num-weight-shards": NEEDS_TE,
    "--symmetric-ar-type": NEEDS_TE,
    "--hierarchical-context-parallel-sizes": NEEDS_TE,
    "--cp-comm-type": f"{NEEDS_TE}; without it, the length of the sequence decides between gathering and a ring",
    "--qk-clip": f"{NEEDS_TE}; it clips the layers of the trunk alone",
    "--log-max-attention-logit": NEEDS_TE,
    "--batch-invariant-mode": "it needs FlashAttention 3",
    "--use-kitchen-attention": f"{NEEDS_PACKAGE}nvidia-kitchen",
    "--overlap-dispatch-backward-with-experts-wgrad": NEEDS_TE,
    "--moe-grouped-gemm": NEEDS_CUDA,
    "--moe-token-dispatcher-type flex": f"{NEEDS_PACKAGE}deep_ep",
    "--moe-permute-fusion": NEEDS_TE,
    "--moe-router-fusion": NEEDS_TE,
    "--moe-paged-stash": NEEDS_CUDA,
    "--moe-latent-size": NEEDS_TE,
    "--moe-use-upcycling": "no dense checkpoint was turned into experts with MTP layers",
    "--moe-pad-expert-input-to-capacity": "it runs with SwiGLU and without biases; tokens above the capacity "
    "are dropped, so that losses are others",
    "--fp32-residual-connection": "it fails without Transformer Engine and without MTP layers as well",
    "--num-distributed-optimizer-instances": f"{NEEDS_PACKAGE}einops",
    "--optimizer lion": "of emerging-optimizers, as soap; muon of that package trains, and resumes to the same bits",
    "--decoupled-lr": "it runs; nothing compares the copies of the embedding in a pipeline",
    "--use-nccl-ub": NEEDS_CUDA,
    "--use-sharp": NEEDS_CUDA,
    "--pipeline-model-parallel-comm-backend ucc": NEEDS_CUDA,
    "--use-ring-exchange-p2p": "it needs a build of torch of its own",
    "--enable-ft-package": f"{NEEDS_PACKAGE}nvidia-resiliency-ext",
    "--non-persistent-ckpt-type local": f"{NEEDS_PACKAGE}nvidia-resiliency-ext",
    "--save-activations-interval": "it fails without Transformer Engine and without MTP layers as well",
    "--record-memory-history": NEEDS_CUDA,
}
"""Flags that were not tested, and why."""
