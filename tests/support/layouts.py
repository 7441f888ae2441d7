"""The parallel layouts that must compute the same as one process: every row here is a test in test_layouts.py.

Plain data, read by the tests and by the jobs that they start (layout_jobs.py). Add a layout as a row of `LAYOUTS`, and
a kind of model as a row of `MODELS`.
"""

from dataclasses import dataclass
from pathlib import Path

_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.1"
)
_UNTIED = "--untie-embeddings-and-output-weights"
_DRAFTER = "--drafter eagle3 --drafter-steps 3 --drafter-layers 1 2 3"
_EAGLE = "--drafter eagle --drafter-steps 3"
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_FLASH = "--drafter dflash --drafter-steps 3 --drafter-num-layers 2 --drafter-blocks 9"
_SPARK = "--drafter dspark --drafter-steps 3 --drafter-num-layers 2 --drafter-blocks 9 --drafter-markov-rank 4"
_FLASH2 = "--drafter dflash2 --drafter-steps 3 --drafter-num-layers 2 --drafter-blocks 9 --drafter-markov-rank 4"
_DOMINO = (
    "--drafter domino --drafter-steps 3 --drafter-num-layers 2 --drafter-blocks 9 --drafter-markov-rank 4 "
    "--drafter-gru-size 5"
)
_PARALLEL = "--drafter peagle --drafter-steps 3 --drafter-num-layers 2 --drafter-blocks 9 --drafter-layers 1 2 3"
_OWN_SIZES = (
    "--drafter-num-attention-heads 4 --drafter-num-query-groups 2 --drafter-kv-channels 6 --drafter-rotary-base 500 "
    '--drafter-rope-scaling {"rope_type":"yarn","factor":4,"original_max_position_embeddings":16}'
)
_OWN_LATENTS = (
    "--drafter-multi-latent-attention 10 12 6 4 5 "
    '--drafter-rope-scaling {"rope_type":"yarn","factor":4,"original_max_position_embeddings":16,"mscale_all_dim":0.8}'
)
_WINDOWED = "--window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable"
_DRAFTED = f"--mtp-draft-vocab-file {Path(__file__).with_name('draft_tokens.txt')}"
_PACKED = "--micro-batch-size 1 --global-batch-size 4 --no-create-attention-mask-in-dataloader"
_DISTILLED = (
    "--mtp-loss mix --mtp-loss-mix 0.2,0.4,0.4 --mtp-label-smoothing 0.1 --mtp-z-loss 1e-3 --mtp-linear-ce-main "
    "--mtp-loss-weights 1,0.8,0.6 --mtp-token-fraction 0.6 --mtp-loss-schedule cosine --mtp-loss-schedule-steps 10"
)
_CHAINED = "--mtp-loss e2e_tv --mtp-loss-weights 1,0.8,0.6 --mtp-temperature 0.7 --mtp-token-fraction 0.6"
_UNROLLED = "--mtp-use-repeated-layer --mtp-unroll 3"
_SHARED = f"{_UNROLLED} --mtp-repeated-layer-shares-kv"
_FIRST_PASS = f"{_UNROLLED} --mtp-repeated-layer-first-pass-kv"
_WHOLE_QUERIES = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm"
)
_MAMBA = "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2"
_DELTA = "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4"
_LATENT = f"{_WHOLE_QUERIES} --q-lora-rank 16"


@dataclass(frozen=True)
class Model:
    """A model to train: MTP layers, flags in addition to `layout_jobs.COMMON`, kind of batches, whether the trunk is
    frozen.

    `beside` is the number of drafts of a drafter next to MTP layers; `exact` models are trained in float64.
    """

    depths: int
    flags: str = ""
    batches: str = "stream"
    attention: str = "--group-query-attention --num-query-groups 2"
    frozen: bool = False
    passes: int | None = None
    beside: int = 0
    exact: bool = False

    @property
    def trained(self) -> int:
        """Number of depths with losses: the passes of a repeated layer, if more than the MTP layers."""
        return self.passes or self.depths

    @property
    def packed(self) -> bool:
        return self.batches in ("packed", "ragged", "padded")


MODELS: dict[str, Model] = {
    "tied-d1": Model(1),
    "untied-d1": Model(1, _UNTIED),
    "tied-d3": Model(3),
    "untied-d3": Model(3, _UNTIED),
    "repeated-d3": Model(3, "--mtp-use-repeated-layer"),
    "unrolled-d1": Model(1, _UNROLLED, passes=3),
    "shared-d1": Model(1, _SHARED, passes=3),
    "shared-documents-d1": Model(
        1, f"{_SHARED} --mtp-hsm --reset-attention-mask --eod-mask-loss", "documents", passes=3
    ),
    "shared-padded-d1": Model(1, f"{_PACKED} {_SHARED} --mtp-loss e2e_tv", "padded", passes=3),
    "first-pass-d1": Model(1, f"{_FIRST_PASS} {_RECOMPUTED}", passes=3),
    "first-pass-latent-d1": Model(1, f"{_LATENT} {_FIRST_PASS}", attention="", passes=3),
    "first-pass-padded-d1": Model(1, f"{_PACKED} {_FIRST_PASS} {_LATENT} {_RECOMPUTED}", "padded", "", passes=3),
    "unrolled-moe-d1": Model(1, f"{_EXPERTS} --moe-token-dispatcher-type allgather {_UNROLLED}", passes=3),
    "hybrid-unrolled-d1": Model(1, f"--hybrid-layer-pattern M-*-/*- {_MAMBA} {_UNROLLED}", passes=3),
    "moe-d1": Model(1, f"{_EXPERTS} --moe-token-dispatcher-type allgather"),
    "moe-d2": Model(2, f"{_EXPERTS} --moe-token-dispatcher-type allgather"),
    "moe-d3": Model(3, f"{_EXPERTS} --moe-token-dispatcher-type allgather"),
    "moe-alltoall-d1": Model(1, f"{_EXPERTS} --moe-token-dispatcher-type alltoall"),
    "moe-alltoall-d3": Model(3, f"{_EXPERTS} --moe-token-dispatcher-type alltoall"),
    "latent-d2": Model(2, _LATENT, attention=""),
    "latent-keys-d1": Model(1, _WHOLE_QUERIES, attention=""),
    "parallel-d2": Model(2, "--mtp-architecture parallel"),
    "documents-d3": Model(3, "--reset-attention-mask --eod-mask-loss", "documents"),
    "packed-d1": Model(1, _PACKED, "packed"),
    "packed-d3": Model(3, _PACKED, "packed"),
    "ragged-d3": Model(3, _PACKED, "ragged"),
    "padded-d1": Model(1, _PACKED, "padded"),
    "padded-d3": Model(3, _PACKED, "padded"),
    "padded-latent-d2": Model(2, f"{_PACKED} {_LATENT}", "padded", attention=""),
    "per-token-moe-d2": Model(2, f"{_EXPERTS} --moe-token-dispatcher-type allgather --calculate-per-token-loss"),
    "per-token-d3": Model(3, "--calculate-per-token-loss"),
    "distilled-d3": Model(3, f"{_UNTIED} {_DISTILLED}"),
    "chained-d3": Model(3, f"{_UNTIED} {_CHAINED}"),
    "chained-padded-d3": Model(3, f"{_PACKED} --mtp-loss e2e_tv", "padded"),
    "mixed-documents-d3": Model(3, "--mtp-hidden-state-mixing --reset-attention-mask --eod-mask-loss", "documents"),
    "mixed-padded-d3": Model(3, f"{_PACKED} --mtp-hsm", "padded"),
    "padded-vocabulary-d2": Model(2, "--make-vocab-size-divisible-by 80 --mtp-loss mix --mtp-loss-mix 0.2,0.4,0.4"),
    "hybrid-d2": Model(2, "--hybrid-layer-pattern *-*-/*-/*-"),
    "hybrid-mamba-d2": Model(2, f"--hybrid-layer-pattern M-*-/M-/M- {_MAMBA}"),
    "hybrid-one-group-d1": Model(1, f"--hybrid-layer-pattern M-*-/*- {_MAMBA} --mamba-num-groups 1"),
    "hybrid-delta-d1": Model(1, f"--hybrid-layer-pattern G-*-/G- {_DELTA} {_UNTIED}"),
    "hybrid-moe-d2": Model(
        2, f"--hybrid-layer-pattern ME*G/*E/*E {_MAMBA} {_DELTA} {_EXPERTS} --moe-token-dispatcher-type allgather"
    ),
    "hybrid-padded-d1": Model(1, f"--hybrid-layer-pattern MG*-/MG {_MAMBA} {_DELTA} {_PACKED}", "padded"),
    "hybrid-frozen-d2": Model(2, f"--hybrid-layer-pattern MG*-/M-/M- {_MAMBA} {_DELTA} --mtp-loss kd", frozen=True),
    "grouped-d3": Model(3, "--mtp-lr 3e-2 --mtp-clip-grad 0.01 --clip-grad 0.02 --weight-decay 0"),
    "frozen-d3": Model(3, "--mtp-loss kd", frozen=True),
    "drafter": Model(0, f"{_DRAFTER} {_DRAFTED}", frozen=True, passes=3),
    "drafter-documents": Model(
        0,
        f"{_DRAFTER} {_UNTIED} {_RECOMPUTED} --reset-attention-mask --eod-mask-loss",
        "documents",
        frozen=True,
        passes=3,
    ),
    "drafter-padded": Model(0, f"{_PACKED} {_DRAFTER} {_DRAFTED} {_RECOMPUTED}", "padded", frozen=True, passes=3),
    "drafter-moe": Model(
        0, f"{_EXPERTS} --moe-token-dispatcher-type allgather {_DRAFTER} --mtp-loss lk", frozen=True, passes=3
    ),
    "drafter-state": Model(0, f"{_EAGLE} {_UNTIED}", frozen=True, passes=3),
    "drafter-state-documents": Model(
        0,
        f"{_EAGLE} {_DRAFTED} {_RECOMPUTED} --reset-attention-mask --eod-mask-loss",
        "documents",
        frozen=True,
        passes=3,
    ),
    "drafter-spark": Model(0, f"{_SPARK} --calculate-per-token-loss", frozen=True, passes=3),
    "drafter-spark-padded": Model(0, f"{_PACKED} {_SPARK} {_DRAFTED}", "padded", frozen=True, passes=3),
    "drafter-flash": Model(0, f"{_FLASH} {_UNTIED} {_DRAFTED} --mtp-loss kd", frozen=True, passes=3),
    "drafter-flash-documents": Model(
        0,
        f"{_FLASH} {_UNTIED} --qk-layernorm --reset-attention-mask --eod-mask-loss",
        "documents",
        frozen=True,
        passes=3,
    ),
    "drafter-latent": Model(0, f"{_LATENT} {_DRAFTER} {_OWN_SIZES} {_DRAFTED}", attention="", frozen=True, passes=3),
    "drafter-latents": Model(0, f"{_DRAFTER} {_OWN_LATENTS} {_DRAFTED}", frozen=True, passes=3),
    "drafter-latents-padded": Model(
        0,
        f"{_LATENT} {_PACKED} {_DRAFTER} --drafter-multi-latent-attention {_RECOMPUTED}",
        "padded",
        "",
        frozen=True,
        passes=3,
    ),
    "drafter-delta-spark": Model(
        0, f"--hybrid-layer-pattern G-*-G- {_DELTA} {_SPARK} {_OWN_SIZES}", frozen=True, passes=3
    ),
    "drafter-mamba-flash": Model(
        0, f"--hybrid-layer-pattern M*-M {_MAMBA} {_FLASH} {_OWN_SIZES}", frozen=True, passes=3
    ),
    "drafter-windows": Model(0, f"{_WINDOWED} {_DRAFTER} --drafter-window-size 4", frozen=True, passes=3),
    "drafter-windows-spark": Model(
        0,
        f"{_WINDOWED} {_SPARK} --drafter-window-size 4 --drafter-full-layers 2 --drafter-softmax-type learnable",
        frozen=True,
        passes=3,
    ),
    "drafter-flash2": Model(0, f"{_FLASH2} {_UNTIED}", frozen=True, passes=3),
    "drafter-latent-flash2": Model(0, f"{_LATENT} {_FLASH2} {_OWN_SIZES}", attention="", frozen=True, passes=3),
    "drafter-delta-flash2": Model(
        0, f"--hybrid-layer-pattern G-*-G- {_DELTA} {_FLASH2} {_OWN_SIZES}", frozen=True, passes=3
    ),
    "drafter-delta-flash2-exact": Model(
        0,
        f"--hybrid-layer-pattern G-*-G- {_DELTA} {_FLASH2} {_OWN_SIZES} --clip-grad 0",
        frozen=True,
        passes=3,
        exact=True,
    ),
    "drafter-mamba-flash2": Model(
        0, f"--hybrid-layer-pattern M*-M {_MAMBA} {_FLASH2} {_OWN_SIZES}", frozen=True, passes=3
    ),
    "drafter-windows-flash2": Model(
        0, f"{_WINDOWED} {_FLASH2} --drafter-window-size 4 --drafter-softmax-type learnable", frozen=True, passes=3
    ),
    "drafter-domino": Model(0, f"{_DOMINO} {_UNTIED}", frozen=True, passes=3),
    "drafter-domino-documents": Model(
        0, f"{_DOMINO} --drafter-idle-rows 1 --reset-attention-mask --eod-mask-loss", "documents", frozen=True, passes=3
    ),
    "drafter-domino-padded": Model(0, f"{_PACKED} {_DOMINO}", "padded", frozen=True, passes=3),
    "drafter-parallel": Model(0, f"{_PARALLEL} {_UNTIED} {_DRAFTED}", frozen=True, passes=3),
    "drafter-parallel-documents": Model(
        0,
        f"{_PARALLEL} {_OWN_SIZES} --drafter-window-size 4 --drafter-full-layers 2 --reset-attention-mask "
        "--eod-mask-loss",
        "documents",
        frozen=True,
        passes=3,
    ),
    "drafter-parallel-padded": Model(0, f"{_PACKED} {_PARALLEL} {_DRAFTED}", "padded", frozen=True, passes=3),
    "beside-d2": Model(2, f"{_DRAFTER} {_UNTIED} {_DRAFTED} --mtp-loss tv", frozen=True, beside=3),
    "beside-trained-d2": Model(2, f"{_DRAFTER} --calculate-per-token-loss", beside=3),
    "beside-spark-d2": Model(2, f"{_SPARK} {_DRAFTED}", frozen=True, beside=3),
    "frozen-moe-d3": Model(3, f"{_EXPERTS} --moe-token-dispatcher-type allgather", frozen=True),
}

MEGATRONS_OWN = ("tied-d1", "untied-d1", "tied-d3", "untied-d3", "repeated-d3", "moe-d2", "moe-alltoall-d3")
"""Models that Megatron's own MTP can also train."""


@dataclass(frozen=True)
class Layout:
    """How models are distributed over processes, and which are tested; `{m}` in flags repeats per MTP layer."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    flags: str = ""
    models: str = ""
    distributed_optimizer: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def command_line(self, depths: int) -> str:
        sizes = (
            f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp} "
            f"--context-parallel-size {self.cp}"
        )
        optimizer = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
        return f"{sizes} {optimizer if self.distributed_optimizer else ''} {self.flags.format(m='m' * depths)}"


_FLASH2_MODELS = "drafter-flash2 drafter-latent-flash2 drafter-mamba-flash2 drafter-windows-flash2"
"""Models compared in float64: after Gated DeltaNet on two tensor-parallel ranks, three float32 gradients differ by
1.2e-5, a fifth above the tolerance.
"""
_AT_ONCE = "drafter-parallel drafter-parallel-documents drafter-domino"
SINGLE = "single"
_EXPERT_PARALLEL = "--expert-model-parallel-size 2"
LAYOUTS: dict[str, Layout] = {
    SINGLE: Layout(),
    "tp2": Layout(
        tp=2,
        models="tied-d3 grouped-d3 padded-vocabulary-d2 chained-d3 padded-latent-d2 shared-d1 parallel-d2 ragged-d3 "
        "first-pass-latent-d1 first-pass-d1 "
        "hybrid-d2 hybrid-delta-d1 hybrid-frozen-d2 drafter drafter-state drafter-spark beside-d2 beside-trained-d2 "
        "drafter-latent drafter-latents drafter-latents-padded drafter-delta-spark drafter-mamba-flash"
        f" drafter-windows drafter-windows-spark {_FLASH2_MODELS} drafter-delta-flash2-exact {_AT_ONCE}",
    ),
    "tp2-sp": Layout(
        tp=2,
        flags="--sequence-parallel",
        models="untied-d1 latent-d2 frozen-moe-d3 chained-padded-d3 moe-alltoall-d1 shared-documents-d1 distilled-d3 "
        "first-pass-latent-d1 "
        "unrolled-moe-d1 mixed-documents-d3 parallel-d2 packed-d1 ragged-d3 per-token-moe-d2 padded-vocabulary-d2 "
        "hybrid-moe-d2 drafter-documents drafter drafter-moe drafter-state-documents drafter-spark drafter-flash "
        "drafter-flash-documents drafter-flash2 drafter-latents beside-trained-d2 beside-spark-d2 "
        "drafter-parallel-documents drafter-domino-documents",
    ),
    "cp2": Layout(
        cp=2,
        models="documents-d3 padded-d1 per-token-moe-d2 shared-padded-d1 hybrid-padded-d1 tied-d3 distilled-d3 "
        "first-pass-d1 first-pass-latent-d1 first-pass-padded-d1 "
        "latent-keys-d1 latent-d2 moe-alltoall-d1 parallel-d2 packed-d1 padded-vocabulary-d2 hybrid-one-group-d1 "
        "hybrid-frozen-d2 drafter-padded drafter drafter-state drafter-spark drafter-spark-padded "
        "drafter-flash-documents beside-d2 beside-trained-d2 beside-spark-d2 drafter-latent drafter-delta-spark "
        "drafter-latents drafter-latents-padded drafter-mamba-flash"
        f" drafter-windows drafter-windows-spark {_FLASH2_MODELS} drafter-delta-flash2 {_AT_ONCE}"
        " drafter-parallel-padded drafter-domino-padded",
    ),
    "pp2": Layout(
        pp=2,
        models="tied-d1 grouped-d3 repeated-d3 ragged-d3 tied-d3 latent-d2 shared-d1 parallel-d2 padded-vocabulary-d2 "
        "first-pass-d1 "
        "per-token-d3 hybrid-moe-d2 hybrid-one-group-d1 drafter drafter-state drafter-state-documents drafter-spark "
        "drafter-flash-documents drafter-moe beside-d2 beside-trained-d2 beside-spark-d2 drafter-latent "
        "drafter-latents drafter-delta-spark drafter-mamba-flash"
        f" drafter-windows drafter-windows-spark {_FLASH2_MODELS} drafter-delta-flash2 {_AT_ONCE}",
    ),
    "pp2-unbalanced": Layout(pp=2, flags="--hybrid-layer-pattern M-*|-/M-/M-", models="hybrid-mamba-d2"),
    "pp2-vpp2-hybrid": Layout(pp=2, flags="--hybrid-layer-pattern M|-|*|-/M-/M-", models="hybrid-mamba-d2"),
    "pp2-vpp2": Layout(
        pp=2,
        flags="--num-virtual-stages-per-pipeline-rank 2",
        models="untied-d3 tied-d3 tied-d1 frozen-d3 drafter drafter-spark beside-trained-d2",
    ),
    "dp2": Layout(
        dp=2,
        models="packed-d3 grouped-d3 tied-d3 distilled-d3 chained-d3 frozen-d3 moe-d3 hybrid-unrolled-d1 "
        "hybrid-one-group-d1 hybrid-padded-d1 drafter drafter-spark beside-d2 "
        "drafter-latent drafter-latents drafter-delta-spark drafter-mamba-flash drafter-windows drafter-windows-spark "
        f"{_FLASH2_MODELS} drafter-delta-flash2 {_AT_ONCE}",
        distributed_optimizer=True,
    ),
    "ep2": Layout(dp=2, flags=_EXPERT_PARALLEL, models="moe-d1 hybrid-moe-d2 drafter-moe"),
    "tp2-pp2": Layout(tp=2, pp=2, models="tied-d3 untied-d1 drafter drafter-flash"),
    "tp2-cp2": Layout(tp=2, cp=2, flags="--sequence-parallel", models="moe-d3 mixed-padded-d3"),
    "cp2-pp2": Layout(cp=2, pp=2, models="padded-d3 documents-d3 drafter-spark-padded"),
    "cp2-dp2": Layout(cp=2, dp=2, models="tied-d3 per-token-d3", distributed_optimizer=True),
    "pp2-dp2": Layout(pp=2, dp=2, models="tied-d3 untied-d3", distributed_optimizer=True),
    "pp2-ep2": Layout(pp=2, dp=2, flags=_EXPERT_PARALLEL, models="moe-alltoall-d3 moe-d1"),
    "pp4": Layout(pp=4, models="padded-d3 documents-d3"),
    "pp4-vpp2": Layout(pp=4, flags="--pipeline-model-parallel-layout E|t|t|t|t|||{m}L", models="tied-d3 untied-d1"),
    "pp4-mtp-stage": Layout(
        pp=4,
        flags="--pipeline-model-parallel-layout Ett|tt|{m}|L",
        models="packed-d1 tied-d3 distilled-d3 chained-d3 unrolled-d1 documents-d3 mixed-padded-d3 frozen-moe-d3",
    ),
    "pp4-vpp2-mtp-stage": Layout(
        pp=4, flags="--pipeline-model-parallel-layout E|t|t|t|t||{m}|L", models="tied-d3 untied-d3"
    ),
}

CASES = [(model, name) for name, layout in LAYOUTS.items() for model in layout.models.split()]
"""Model and layout of every comparison with a single process: a covering set, see `COVERED`."""

FEATURES = {
    "repeated layer": "--mtp-use-repeated-layer",
    "unrolled": "--mtp-unroll",
    "shared keys": "--mtp-repeated-layer-shares-kv",
    "keys of pass 1": "--mtp-repeated-layer-first-pass-kv",
    "mixed states": "--mtp-h",
    "parallel heads": "--mtp-architecture parallel",
    "experts": "--num-experts",
    "all to all": "alltoall",
    "latent attention": "--multi-latent-attention",
    "latent queries": "--q-lora-rank",
    "mean per token": "--calculate-per-token-loss",
    "mixed losses": "--mtp-loss mix",
    "coupled losses": "e2e_tv",
    "a part of the tokens": "--mtp-token-fraction",
    "fused head": "--mtp-linear-ce-main",
    "parameter group": "--mtp-clip-grad",
    "padded vocabulary": "--make-vocab-size-divisible-by",
    "hybrid": "--hybrid-layer-pattern",
    "Mamba": "--mamba-state-dim",
    "one group": "--mamba-num-groups 1",
    "Gated DeltaNet": "--linear-key-head-dim",
}
"""Features of a model, and the flags that show them."""


def features(model: str) -> set[str]:
    """Return what a layout may have to treat specially."""
    of = MODELS[model]
    found = {name for name, words in FEATURES.items() if words in of.flags}
    found |= {of.batches, "one depth" if of.depths == 1 else "depths"}
    return found | {"frozen" if of.frozen else "trained", "untied" if _UNTIED in of.flags else "tied"}


KINDS = ("tp", "sp", "cp", "pp", "dp", "ep", "vpp", "stage")
"""Tensor parallelism without and with sequence parallelism; context, pipeline, data (distributed optimizer) and expert
parallelism; virtual stages; a separate stage for MTP layers.
"""


def kinds(layout: str) -> set[str]:
    """Return the kinds of parallelism in a layout."""
    of = LAYOUTS[layout]
    found = {kind for kind in ("cp", "pp", "dp") if getattr(of, kind) > 1}
    found |= {kind for kind in ("vpp", "stage") if kind in layout}
    found |= {"ep"} if _EXPERT_PARALLEL in of.flags else set()
    return found | ({"sp" if "--sequence-parallel" in of.flags else "tp"} if of.tp > 1 else set())


EVERY = {each for model in MODELS for each in features(model)}
_TRIED_WITH_DP = EVERY - {"documents", "ragged", "mixed states", "parallel heads", "padded vocabulary"}
_TRIED_WITH_DP -= {"shared keys", "keys of pass 1"}
COVERED: dict[str, set[str]] = {
    # Megatron requires sequence parallelism for experts, and at least as many groups as tensor-parallel ranks.
    "tp": EVERY
    - {"experts", "all to all", "one group", "documents", "mixed states", "packed", "mean per token"}
    - {"fused head"},
    "sp": EVERY - {"one group", "parameter group"},
    "cp": EVERY - {"ragged", "parameter group"},  # the length of a packed document is a multiple of four there
    "pp": EVERY,
    "dp": _TRIED_WITH_DP - {"latent attention", "latent queries"},
    "ep": {"experts", "all to all", "hybrid", "Mamba", "Gated DeltaNet"},
    "vpp": {"tied", "untied", "one depth", "depths", "frozen", "hybrid", "Mamba"},
    "stage": {"unrolled", "mixed states", "experts", "frozen", "packed", "padded", "documents"},
}
"""Features that occur with each kind of parallelism in some case of `CASES`."""

FIRST: dict[str, str] = {
    "tp2": "tied-d3 padded-vocabulary-d2 drafter drafter-spark",
    "tp2-sp": "frozen-moe-d3",
    "cp2": "documents-d3 first-pass-latent-d1 drafter drafter-spark",
    "pp2": "tied-d1",
    "pp2-vpp2": "untied-d3",
    "dp2": "grouped-d3",
    "ep2": "moe-d1",
    "pp4-mtp-stage": "packed-d1",
}
"""Cases of the first tier: every way to split a model, and what a layout treats specially."""


def sources(model: str) -> list[str]:
    """Return the layouts that save a checkpoint of the model."""
    return [name for name, layout in LAYOUTS.items() if name == SINGLE or model in layout.models.split()]


LOADS = [
    ("drafter", "pp2"),
    *(("tied-d3", name) for name in (SINGLE, "tp2", "cp2", "dp2", "pp4-vpp2", "pp4-mtp-stage")),
    *(("moe-d3", name) for name in (SINGLE, "tp2-cp2")),
]
"""Model, and the layout that loads the checkpoints of all layouts."""

MOVES = [("drafter", "pp2", "tp2")] + [
    ("tied-d3", source, target)
    for source, target in (
        (SINGLE, "pp2"),
        ("pp2", "tp2"),
        ("tp2", "cp2"),
        ("cp2", "tp2-pp2"),
        ("tp2-pp2", "pp4-vpp2"),
        ("pp4-vpp2", "pp4-mtp-stage"),
        ("pp4-mtp-stage", "pp2-vpp2"),
        ("pp2-vpp2", SINGLE),
        ("dp2", "cp2-dp2"),
        ("cp2-dp2", "pp2-dp2"),
        ("pp2-dp2", "dp2"),
    )
]
"""Model, the layout that saved a checkpoint, and the layout that resumes from it."""

FIRST_MOVE = ("tied-d3", "dp2", "cp2-dp2")
"""The move of the first tier: slices of an optimizer."""


def needs(job: str) -> list[str]:
    """Return the jobs that must run before this one, because it loads what they save."""
    name, model, *rest = job.split("/")
    if name in ("train", "resave", "policy", "policy_reference", "export"):
        return [f"init/{model}/ours"]
    if name == "forward":
        return [f"init/{model}/{rest[-1]}"]
    if name == "move":
        return [f"train/{model}/{rest[0]}"]
    return [f"train/{model}/{source}" for source in sources(model)] if name == "load" else []
