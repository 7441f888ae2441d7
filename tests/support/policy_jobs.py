"""Jobs (layout_jobs.py) for a policy's training step as an RL trainer runs it: with its own loop, loss and forward
calls.

`policy` records the MTP gradients from `mtp_loss` next to the policy's loss, and whether the policy's own gradients are
bit-identical to a step without it. `policy_reference` computes them with a loop over single rollouts in float64.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layout_jobs import (
    JOBS,
    NEW_RUN,
    VOCABULARY,
    build,
    complete_gradients,
    gradients_as_weights,
    whole_tensors,
)
from layouts import LAYOUTS
from megatron.core import mpu
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.data.batch import depth_batch, positions_of_ranks
from megatron_mtp.losses.mtp_loss import logits_and_states, mtp_loss
from megatron_mtp.spec.config import MTPConfig

ROLLOUTS = [[(3, 9), (2, 4)], [(5, 17)], [(1, 2), (4, 3), (2, 11)], [(6, 2)]]
"""Tokens of prompt and answer of every rollout, by microbatch, which have 20, 24, 28 and 8 positions."""

LAMBDA = 0.3
SETTINGS = {
    "ce by tokens": MTPConfig(),
    "ce by sequences": MTPConfig(mtp_loss_weights="1,0.8,0.6"),
    "kd by tokens": MTPConfig(mtp_loss="kd"),
    "tv by sequences": MTPConfig(mtp_loss="tv"),
}
"""Settings of the MTP loss, and its normalizer: answer tokens of the global batch, or those of each rollout times the
number of rollouts.
"""

Row = dict[str, Any]


def policy(folder: Path, model_name: str, layout_name: str) -> dict[str, Any]:
    """Return {batch format and loss: MTP gradients}, and the number of trunk tensors that differ for each."""
    load = f"--load {folder / 'init' / 'ours' / model_name} {NEW_RUN} --no-check-for-nan-in-loss-and-grad"
    model, optimizer, _ = build(model_name, LAYOUTS[layout_name], flags=load)
    config = get_model_config(model[0])
    config.finalize_model_grads_func, config.variable_seq_lengths = finalize_model_grads, True
    record: dict[str, Any] = {"gradients": {}, "trunk": {}}
    for form, batches in {"packed": packed, "padded": padded}.items():
        step = partial(gradients, model, optimizer, [batches(number) for number in range(len(ROLLOUTS))])
        alone = step(None)
        for name, settings in SETTINGS.items():
            made = step(settings, name)
            trunk = [key for key in alone if not key.startswith("mtp.")]
            record["trunk"][f"{form} {name}"] = [key for key in trunk if not torch.equal(made[key], alone[key])]
            record["gradients"][f"{form} {name}"] = {key: value for key, value in made.items() if key not in trunk}
        joined = step(SETTINGS["ce by tokens"], "ce by tokens", is_apart=False)
        record["trunk"][f"{form} joined"] = [key for key in trunk if not torch.equal(joined[key], alone[key])]
    return record


def gradients(
    model: list[torch.nn.Module],
    optimizer: Any,
    batches: list[Row],
    settings: MTPConfig | None,
    name: str = "",
    is_apart: bool = True,
) -> dict[str, Tensor]:
    """Return whole gradients of a policy step, by key; with the MTP loss if settings are given."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    own = batches[rank::ranks]
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, settings, name, is_apart, ranks * len(own)),
        data_iterator=iter(own),
        model=model,
        num_microbatches=len(own),
        seq_length=own[0]["tokens"].size(1),
        micro_batch_size=len(own[0]["tokens"]),
        forward_only=False,
    )
    complete_gradients(model)
    with gradients_as_weights(model):
        found: dict[str, Tensor] = whole_tensors(model, "gradients")["gradients"]
    return found


def forward_step(
    settings: MTPConfig | None, name: str, is_apart: bool, means: int, data: Iterator[Row], model: torch.nn.Module
) -> tuple[Any, Any]:
    """Compute the policy gradient with the rollouts' advantages; `means` cancels the averaging of Megatron's schedule
    and DDP.
    """
    row = next(data)
    here = {key: row[key][:, row["own"]] for key in ("tokens", "labels", "mask", "advantage")}
    position_ids = row["own"].expand(len(row["tokens"]), -1)
    output = model(
        here["tokens"],
        position_ids,
        None,
        packed_seq_params=row["packed"],
        **({} if settings is None else {"output_processor": logits_and_states}),
    )

    def loss(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits_BSV, hidden_SBH = (output, None) if settings is None else output
        nats = unwrap_model(model).compute_language_model_loss(here["labels"], logits_BSV.transpose(0, 1).contiguous())
        total = (nats * here["mask"] * here["advantage"]).sum() / answers()
        if settings is not None:
            normalizer = answers() if "tokens" in name else row["lengths"] * sum(map(len, ROLLOUTS))
            states_SBH = hidden_SBH.detach() if is_apart else hidden_SBH
            given = states_SBH, model, row["tokens"], None, row["mask"], settings
            made = mtp_loss(*given, packed_seq_params=row["packed"], normalizer=normalizer)
            total = total + LAMBDA * made.loss
        return total * means, {"loss": total.detach()}

    return output, loss


# --- the batches -----------------------------------------------------------------------------------------------------


def answers() -> int:
    return sum(answer for microbatch in ROLLOUTS for _, answer in microbatch)


def rollout(number: int, index: int) -> Tensor:
    """Return the tokens of a prompt and its answer."""
    generator = torch.Generator().manual_seed(100 * number + index)
    return torch.randint(VOCABULARY, (sum(ROLLOUTS[number][index]),), generator=generator)


def filled(number: int, held: list[int]) -> list[Row]:
    """Return a microbatch's rollouts with labels, masks, advantages and lengths, each [positions]."""
    rows = []
    for index, (prompt, answer) in enumerate(ROLLOUTS[number]):
        tokens, size = rollout(number, index), held[index]
        whole = torch.zeros(size, dtype=torch.long)
        whole[: len(tokens)] = tokens
        position = torch.arange(size)
        rows.append(
            {
                "tokens": whole,
                "labels": whole.roll(-1),
                "mask": ((position >= prompt - 1) & (position < prompt + answer - 1)).float(),
                "advantage": torch.full((size,), (-1.0) ** index * (1 + number)),
                "lengths": torch.full((size,), float(answer)),
            }
        )
    return rows


def packed(number: int) -> Row:
    """Return one row; rollouts are padded to multiples of four, so that two context-parallel ranks can split it."""
    sizes = [sum(each) for each in ROLLOUTS[number]]
    held = [-(-size // 4) * 4 for size in sizes]
    rows = filled(number, held)
    row = {key: torch.cat([each[key] for each in rows])[None] for key in rows[0]}
    offsets, places = (torch.tensor([0, *each]).cumsum(0, dtype=torch.int32) for each in (sizes, held))
    row["packed"] = PackedSeqParams("thd", offsets, offsets, places, places, max(held), max(held))
    return cut(row, places)


def padded(number: int) -> Row:
    """Return one row per rollout."""
    longest = max(-(-sum(each) // 4) * 4 for each in ROLLOUTS[number])
    rows = filled(number, [longest] * len(ROLLOUTS[number]))
    row: Row = {key: torch.stack([each[key] for each in rows]) for key in rows[0]}
    return cut({**row, "packed": None}, torch.tensor([0, longest]))


def cut(row: Row, offsets: Tensor) -> Row:
    """Keep the positions of this context-parallel rank."""
    rank, ranks = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    whole = torch.arange(row["tokens"].size(1))
    return {**row, "own": whole if ranks == 1 else positions_of_ranks(offsets, ranks)[rank]}


# --- the reference ---------------------------------------------------------------------------------------------------


def policy_reference(folder: Path, model_name: str) -> dict[str, Any]:
    """Return {loss: MTP gradients}, computed rollout by rollout in float64, without packing, padding and chunks."""
    model = load_model(folder / "init" / "ours" / model_name / "iter_0000001").double()
    model.config.mtp_detach_heads = True
    record: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        losses = [
            rollout_loss(model, rollout(number, index), ROLLOUTS[number][index], settings, name)
            for number, microbatch in enumerate(ROLLOUTS)
            for index in range(len(microbatch))
        ]
        model.zero_grad()
        (LAMBDA * torch.stack(losses).sum()).backward()
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        with gradients_as_weights([model]):
            found = whole_tensors([model], "gradients")["gradients"]
        record[name] = {key: value for key, value in found.items() if key.startswith("mtp.")}
    return record


def rollout_loss(model: Any, tokens_S: Tensor, sizes: tuple[int, int], settings: MTPConfig, name: str) -> Tensor:
    """Return (1 / D) sum_d w_d sum_i loss / normalizer, over answer tokens t_{i+d+1} that depths d = 1 .. D predict."""
    (prompt, answer), length, depths = sizes, len(tokens_S), model.mtp.depths
    batch = {"tokens": tokens_S[None], "labels": tokens_S[None], "loss_mask": torch.ones(1, length)}
    stage = model(
        tokens_S[None],
        torch.arange(length)[None],
        None,
        output_processor=lambda stage: stage,
        output_processor_context=[depth_batch(batch, depths)],
    )
    weight_VH, total = stage.head.weight.detach(), torch.zeros((), dtype=torch.float64)
    for depth, (states_SBH, scale) in enumerate(
        zip(stage.drafted[0].hidden, settings.loss_weights(depths), strict=True), start=1
    ):
        for i in range(length - depth - 1):
            if i + depth + 1 < prompt:
                continue
            q_V = (weight_VH @ states_SBH[i, 0])[:VOCABULARY].log_softmax(0)
            p_V = (weight_VH @ stage.hidden_SBH[i + depth, 0].detach())[:VOCABULARY].softmax(0)
            loss = {
                "ce": -q_V[tokens_S[i + depth + 1]],
                "kd": (p_V * (p_V.log() - q_V)).sum(),
                "tv": 1 - torch.minimum(p_V, q_V.exp()).sum(),
            }[settings.mtp_loss]
            total = total + scale * loss / depths
    return total / (answers() if "tokens" in name else answer * sum(map(len, ROLLOUTS)))


JOBS |= {"policy": policy, "policy_reference": policy_reference}
