"""CUDA graphs of steps other than those of `drafting.graphs`: sampled, rejecting, mtp_eagle, with experts."""

import contextlib
import os
from typing import Any
from unittest import mock

import torch

from benchmarks.agreeing import agreeing_model
from benchmarks.gpu.drafting import without_graphs
from benchmarks.gpu.part import Setting
from benchmarks.gpu.training import TRAINED, saved
from benchmarks.harness import Found, Goal, Table
from megatron_mtp.decoding import batch, generate, load_runner
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.runner import STATIC_EXPERTS, Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.model.build import join_world

SAMPLED = Sampling(2.0)
MTP, EAGLE = ({"method": name, "num_speculative_tokens": 2} for name in ("mtp", "mtp_eagle"))
CASES: dict[str, tuple[dict[str, Any] | None, Sampling]] = {
    "plain": (None, Sampling()),
    "plain, sampled": (None, SAMPLED),
    "mtp": (MTP, Sampling()),
    "mtp, sampled: rejection": (MTP, SAMPLED),
    "mtp_eagle": (EAGLE, Sampling()),
    "mtp_eagle, sampled: rejection": (EAGLE, SAMPLED),
}


def replays(setting: Setting) -> Found:
    """Check replays of a dense model with random weights in bfloat16."""
    join_world()
    size = (1, 64, 256) if setting.quick else (4, 512, 4096)
    return replayed(setting, Runner(agreeing_model(*size, depths=2, noise=0.5).to(torch.bfloat16)), "dense")


def expert_replays(setting: Setting, flags: str) -> Found:
    """Check replays of a model with experts after some training steps in float32."""
    checkpoint = saved(setting, f"{TRAINED} {flags} --mtp-num-layers 2", 2 if setting.quick else 20)
    with mock.patch.dict(os.environ, {STATIC_EXPERTS: "1"}):
        runner = load_runner(checkpoint, dtype=torch.float32)
    return replayed(setting, runner, "experts")


def replayed(setting: Setting, runner: Runner, kind: str) -> Found:
    """Compare the outputs of every case with graphs and in Python; the second run replays from the first step on."""
    tokens = 12 if setting.quick else 48
    recorded = batch.can_record(runner, Proposer(runner, SpeculativeConfig("mtp")), 2)
    rows = list[tuple[Any, ...]]()
    for name, (config, sampling) in CASES.items():
        texts = []
        for graphed in (False, True, True):
            with contextlib.nullcontext() if graphed else mock.patch.object(batch, "can_record", return_value=False):
                made = generate(runner, [[5, 6, 7], [8, 9]], tokens, sampling, config)
            texts.append(made.token_ids)
        rows.append((name, made.stats.accepted_length, sum(one != texts[0] for one in texts)))
    header = ("steps", "tokens a forward", "runs with other tokens")
    return Found(
        {"kind": kind, "rows": [dict(zip(header, row, strict=True)) for row in rows]},
        [Goal(f"replays, {kind}: runs with other tokens than in Python", sum(row[-1] for row in rows), 0)],
        [Table(f"Steps as CUDA graphs, {kind}", header, rows)],
        without_graphs(recorded),
    )
