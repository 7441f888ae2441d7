"""`train --config --dry-run`: the plan of 64 ranks in one process, from a file of flags."""

import re
import sys
from pathlib import Path

import launch
import pytest
from published_lines import PUBLISHED
from tiers import tiered

from megatron_mtp.extensions.plan.memory import PARTS as HELD

RUN = """
model:
  {num-layers: 36, hidden-size: 4096, ffn-hidden-size: 12288, num-attention-heads: 32, group-query-attention: true,
  num-query-groups: 8, kv-channels: 128, qk-layernorm: true, seq-length: 4096, max-position-embeddings: 40960,
  position-embedding-type: rope, normalization: RMSNorm, swiglu: true, disable-bias-linear: true,
  untie-embeddings-and-output-weights: true, mtp-num-layers: 1}
layout: {tensor-model-parallel-size: 2, sequence-parallel: true, use-distributed-optimizer: true}
training: {bf16: true, micro-batch-size: 1, global-batch-size: 256, train-iters: 10, lr: 1e-3, eval-interval: 10}
data: {mock-data: true, tokenizer-type: NullTokenizer, vocab-size: 151936}
"""
"""The shape of Qwen3-8B with one MTP layer."""


def test_a_plan_counts_parameters_and_places_the_mtp_layers(tmp_path: Path) -> None:
    """Qwen3-8B has 8,190,735,360 parameters; 128 padding rows in both tables are 1,048,576 more."""
    (tmp_path / "run.yaml").write_text(RUN)
    older = "--cuda-graph-impl transformer_engine --cuda-graph-scope attn --te-rng-tracker"
    flags = (
        f"--config {tmp_path}/run.yaml --global-batch-size 512 --pipeline-model-parallel-size 4 {older} --dry-run 64"
    )
    command = [sys.executable, "-m", "megatron_mtp", "train", *flags.split()]
    printed = launch.run(command, tmp_path / "log")
    for line in (
        "  --global-batch-size 512",  # the command line wins
        "layout of 64 ranks: data 8, tensor 2, pipeline 4, context 1, expert 1",
        "step: 512 sequences of 4096 tokens, 2,097,152 tokens, in 64 microbatches of 1 on every data-parallel rank",
    ):
        assert line in printed.splitlines()
    rows = re.findall(r"^  (trunk|depths|embedding|head) +([\d,]+)$", printed, re.MULTILINE)
    sizes = {part: int(size.replace(",", "")) for part, size in rows}
    assert sizes["trunk"] + sizes["embedding"] + sizes["head"] == 8_190_735_360 + 1_048_576
    layer = 6_946_071_552 // 36
    assert sizes["depths"] == layer + 2 * 4096**2 + 3 * 4096  # eh_proj, two norms before it and one after the layer
    held = re.search(r"^a rank of stage 3 holds ([\d,]+) parameters: (.*)$", printed, re.MULTILINE)
    assert held is not None
    parts = dict(part.split(" ", 1) for part in held[2].split(", "))
    counts = {part: int(size.removesuffix(" (a copy)").replace(",", "")) for part, size in parts.items()}
    assert [part for part, size in parts.items() if size.endswith(" (a copy)")] == ["embedding"]
    assert counts.keys() == {"embedding", "trunk", "depths", "head"}
    assert sum(counts.values()) == int(held[1].replace(",", ""))
    gib = (6 + 12 / 8) * counts["depths"] / 2**30  # eight replicas share Adam's 12 bytes per parameter
    names, *stages = printed.split("memory of a rank, GiB\n")[1].splitlines()[:5]
    assert re.split(r"  +", names.strip()) == ["stage", *HELD, "GiB"]
    assert [row.split()[0] for row in stages] == ["0", "1", "2", "3"]
    assert stages[3].split()[1 + HELD.index("MTP layers")] == f"{gib:.2f}"


QUICK = ["deepseek-v3, Pai's own flags", "qwen3-235b-a22b", "mimo-7b", "nemotron-3-nano, older pattern"]


@pytest.mark.parametrize("name", tiered(PUBLISHED, QUICK))
def test_a_published_line_is_planned_on_a_machine_without_gpus(name: str, tmp_path: Path) -> None:
    line = PUBLISHED[name]
    text = "--mock-data --tokenizer-type NullTokenizer"
    command = [sys.executable, "-m", "megatron_mtp", "train", "--dry-run", str(line.ranks)]
    process = launch.start([*command, *line.flags.split(), *text.split()], tmp_path / "log")
    status = process.wait(launch.TIMEOUT)
    assert (line.says in (tmp_path / "log").read_text(), status) == (True, 2 * line.refused)
