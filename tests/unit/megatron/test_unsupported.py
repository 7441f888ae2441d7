"""Megatron's features in runs with MTP layers: every flag is classified, errors are sentences, and the page agrees."""

import re
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterable
from fnmatch import fnmatch

import pytest
from documents import ROOT
from features import SETUPS, TRIED, UNTRIED, Tried  # in tests/support
from megatron.training.arguments import add_megatron_arguments
from run_flags import DEPTHS, MOCK, ROPE, _in_no_job, refusal  # noqa: F401  # a fixture

from megatron_mtp.megatron.flags import UNSUPPORTED, Unsupported
from megatron_mtp.megatron.parsing import parse_flags
from megatron_mtp.training.checks import check_supported

PAGE = ROOT / "docs/reference/features.md"
PLAIN = f"{ROPE} {MOCK} {DEPTHS}"
OF_GROUPS = {
    "never read in training": {"options", "vision", "biencoder", "inference", "autoresume"},
    "refused by Megatron itself, whose wheel lacks the package": {"rl"},
    "refused as a whole, by their main flag": {
        "straggler",
        "heterogeneous architecture",
        "In-process restart",
        "Logits Distillation",
    },
    "what is printed, measured and saved": {
        "logging",
        "one logger",
        "profiling",
        "checkpointing",
        "workload inspector",
        "ft_package",
        "rerun engine",
        "msc",
    },
    "the data": {"data and dataloader", "tokenizer", "validation", "sft"},
    "what the trunk computes, which depths repeat": {"network size", "mla", "experimental_attention_variant"},
    "the schedule of the run": {"learning rate and weight decay", "RNG and initialization", "fault injector"},
}
"""Groups of Megatron's parser whose flags affect neither output layer, embedding and loss nor the schedule."""

OF_FLAGS = {
    "layouts, tests/support/layouts.py": (
        "--*-parallel-size --sequence-parallel --pipeline-model-parallel-layout --num-*virtual* "
        "--model-parallel-size --decoder-*-pipeline-num-layers --account-for-* --use-distributed-optimizer --mtp-*"
    ),
    "what the trunk computes, which depths repeat": (
        "--num-layers --hidden-* --num-attention-heads --ffn-* --kv-channels --attention-* --softmax-type "
        "--*-query-* --apply-* --norm* --*-bias* --add-* --glu-* --activation-* --rotary-* --qk-* "
        "--multi-latent-attention --experimental-attention-variant --*dsa-* --linear-* --*init* --use-mup --mup-* "
        "--mrope-* --rope-type --moe-ffn-* --moe-router-* --moe-shared-* --moe-*-coeff --moe-*-jitter-* "
        "--moe-*interleave* --moe-layer-freq --num-experts --moe-apply-* --moe-token-drop-policy --spec --hybrid-* "
        "--is-hybrid-model --*mamba-*"
    ),
    "how Megatron computes it, in its own layers": (
        "--fp16 --bf16 --flash-* --disable-bf16-* --use-fused-* --fused-* --use-te-* --use-transformer-engine-* "
        "--transformer-impl --no-*-fusion --no-persist-layer-norm --disable-jit-fuser --use-flash-attn --*fp8-* "
        "--fp4-* --num-layers-at-* --kitchen-* --*grouped-gemm* --moe-single-* --moe-flex-* --moe-enable-deepep "
        "--moe-*-sms* --moe-hybridep-* --moe-ncclep-* --moe-permute-* --moe-expert-rank-* --moe-pad-* "
        "--moe-upcycling-* --mlp-chunks-* --*cuda-graph* --disable-clone-* --cpu-offloading-* --*offload* "
        "--moe-paged-* --recompute-* --checkpoint-activations --moe-token-dispatcher-type"
    ),
    "how ranks communicate, below the model": (
        "--disable-tp-comm-* --tp-comm-* --*p2p-communication* --wgrad-deferral-limit --*-comm-stream "
        "--max-seqlen-* --ep-overlap-* --distributed-* --local-rank --lazy-mpu-init --nccl-* --high-priority-* "
        "--sharp-* --flight-* --disable-flight-* --ddp-* --no-use-layer-wise-* --overlap-param-* --*fsdp* "
        "--*-sharding-* --no-gradient-reduce-* --suggested-* --keep-fp8-* --disable-align-* --disable-symmetric-* "
        "--delay-wgrad-compute --outer-dp-* --use-sharp --fake-process-group --cp-comm-type"
    ),
    "the optimizer's own numbers": (
        "--optimizer --adam-* --sgd-* --muon-* --lion-* --weight-decay --clip-grad --no-weight-decay-* "
        "--main-*-dtype --exp-avg-* --loss-scale* --initial-* --min-loss-* --hysteresis --overlap-cpu-* --no-pin-* "
        "--dump-param-*"
    ),
    "the loop around the step": (
        "--*batch-size* --empty-* --gpu-sniff-* --train-* --exit-* --manual-gc* --disable-manual-gc-* "
        "--iterations-* --check-for-* --no-check-for-* --result-* --dataloader-type --use-mcore-models "
        "--*batch-invariant* --profile*"
    ),
    "never read in training": (
        "--inference-* --*nccl-all-reduce-for-prefill --config-logger-dir --yaml-cfg --enable-experimental --onnx-safe"
    ),
    "tests/unit/model/test_layout_invariance.py": "--calculate-per-token-loss",
    "another implementation of a feature in the table": "--cross-entropy-fusion-impl",
}


def placed_by_flag() -> list[str]:
    named = " ".join([*(row.flags for row in (*UNSUPPORTED, *TRIED)), *UNTRIED, *OF_FLAGS.values()])
    return [word for word in named.split() if word.startswith("--")]


def test_every_flag_of_megatron_has_a_place() -> None:
    """A new release may add a feature that needs review."""
    groups = {group for named in OF_GROUPS.values() for group in named}
    patterns = placed_by_flag()
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    unplaced = [
        action.option_strings[0]
        for group in parser._action_groups
        if group.title not in groups
        for action in group._group_actions
        if not any(fnmatch(option, pattern) for option in action.option_strings for pattern in patterns)
    ]
    assert unplaced == []


def as_typed(row: Unsupported) -> str:
    """Return the flags of a row, with values."""
    values = {"-dir": " x", "-path": " x", "-json": " x", "-pattern": " *-/*-/*-"}
    ends = (next((value for end, value in values.items() if word.endswith(end)), "") for word in row.flags.split())
    return " ".join(word + value for word, value in zip(row.flags.split(), ends, strict=True))


@pytest.mark.parametrize("row", UNSUPPORTED, ids=lambda row: row.flags)
def test_an_unsupported_feature_is_rejected(
    row: Unsupported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(f"{PLAIN} {as_typed(row)}", monkeypatch, capsys) == f"pretrain_gpt.py: error: {row.sentence()}"
    trunk = parse_flags(as_typed(row).split())
    if row.depths_alone:
        check_supported(trunk)
    else:
        with pytest.raises(ValueError, match=row.flags):
            check_supported(trunk)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad", "--cuda-graph-impl full_iteration"),
        ("--external-cuda-graph --mtp-use-repeated-layer", "--cuda-graph-impl transformer_engine --mtp-use-repeated"),
    ],
)
def test_a_feature_is_refused_by_its_older_name_too(
    flags: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(f"{PLAIN} {flags}", monkeypatch, capsys).startswith(f"pretrain_gpt.py: error: {named}")


def test_expert_overlap_is_rejected_with_a_frozen_trunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = "--overlap-moe-expert-parallel-comm was given with --mtp-train-only"
    assert named in refusal(f"{PLAIN} --mtp-train-only --overlap-moe-expert-parallel-comm", monkeypatch, capsys)


def test_flags_that_match_a_row_only_partly_are_accepted() -> None:
    for flags in ("--cuda-graph-impl transformer_engine", "--mtp-use-repeated-layer", "--cuda-graph-impl local"):
        check_supported(parse_flags(f"{DEPTHS} {flags}".split()))


def lists_of_the_page() -> str:
    """Return the rejected, working and untested flags; flags with the same reason or setup share an item."""
    refused = [
        (f"{row.because}{'' if row.depths_alone else ' (refused without MTP layers too)'}", row.flags)
        for row in UNSUPPORTED
    ]
    works = [(shown(row), row.flags) for row in TRIED]
    untried = [(why, flag) for flag, why in UNTRIED.items()]
    setups = wrapped(f"{name} = {flags}" for name, flags in SETUPS.items())
    return "\n\n".join(
        [
            f"## Refused\n{items(refused, flags_first=True)}",
            f"## Works\n```text\n{setups}\n```",
            items(works),
            f"## Untried\n{items(untried)}",
        ]
    )


def items(rows: list[tuple[str, str]], flags_first: bool = False) -> str:
    """Return a list with an item for each reason and its flags."""
    found = dict[str, list[str]]()
    for why, flags in rows:
        found.setdefault(why, []).append(f"`{flags}`")
    whole = [(", ".join(flags), why) if flags_first else (why, ", ".join(flags)) for why, flags in found.items()]
    return wrapped(f"- {before[0].upper()}{before[1:]}: {after}" for before, after in whole)


def wrapped(texts: Iterable[str]) -> str:
    """Wrap lines as on a page; inline code is not split."""
    kept = (re.sub("`[^`]+`", lambda span: span[0].replace(" ", "\0"), text) for text in texts)
    lines = [line for text in kept for line in textwrap.wrap(text, 130, subsequent_indent="  ", break_on_hyphens=False)]
    return "\n".join(lines).replace("\0", " ")


def shown(row: Tried) -> str:
    """Return the setup on which the feature was tested, as the page states it."""
    both = row.both.replace("{folder}", "DIR")
    for name, flags in SETUPS.items():
        both = both.replace(flags, name)
    processes = f"{row.processes} process{'es' * (row.processes > 1)}"
    return processes + (f", `{both}`" if both else "")


def test_the_page_shows_the_lists() -> None:
    """To rewrite them: PYTHONPATH=tests/unit:tests .venv/bin/python tests/unit/megatron/test_unsupported.py"""
    page = PAGE.read_text(encoding="utf-8")
    assert page[page.index("## Refused") :] == lists_of_the_page() + "\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page[: page.index("## Refused")] + lists_of_the_page() + "\n", encoding="utf-8")
