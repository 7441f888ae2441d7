"""Faults planted in a copy of Megatron-Core, which `prove` must find.

python tests/extensions/prove/mutants.py [NAME ...]     prints per mutant whether it was found, and the reported cause
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_mtp.extensions.prove.cases import CP, DP, ONE, PP, Case, Layout
from megatron_mtp.extensions.prove.proving import WRONG, Proof, prove
from megatron_mtp.extensions.prove.shrink import shrink

MTP, GPT = "transformer/multi_token_prediction.py", "models/gpt/gpt_model.py"
SCHEDULES = "pipeline_parallel/schedules.py"
FLAGS = (
    "--num-layers 61 --num-attention-heads 128 --group-query-attention --num-query-groups 8 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --position-embedding-type rope --mtp-num-layers 2 "
    "--untie-embeddings-and-output-weights"
)
HERE = ((ONE, "holes"), (ONE, "packed"))


@dataclass(frozen=True)
class Mutant:
    """A fault: text in a file and its replacement, and words that the reported cause should contain."""

    name: str
    old: str
    new: str
    cause: str
    file: str = MTP
    cases: tuple[tuple[Layout, str], ...] = HERE
    more: str = ""


def _mask(new: str) -> tuple[str, str]:
    """Return a change of the loss mask's roll, inside the loop over depths."""
    return (
        "        loss_mask, num_tokens = roll_tensor(\n            loss_mask, shifts=-1, dims=-1, cp_group=cp_group, "
        "packed_seq_params=packed_seq_params\n        )\n\n        mtp_loss = compute",
        f"        {new}\n\n        mtp_loss = compute",
    )


LABELS = (
    "        mtp_labels, _ = roll_tensor(\n            mtp_labels, shifts=-1, dims=-1, cp_group=cp_group, "
    "packed_seq_params=packed_seq_params\n        )"
)
ROLLED_IDS = (
    "        input_ids, _ = roll_tensor(\n            input_ids,\n            shifts=-1,\n            dims=-1,\n"
    "            cp_group=self.cp_group,\n            packed_seq_params=packed_seq_params,\n        )"
)
PLAIN = "hidden_states, mtp_loss_scale * mtp_loss / safe_num_tokens"
CONCATENATED = "torch.cat((decoder_input, hidden_states), -1)"
CALLED = "            hidden_states, input_ids, position_ids, padding_mask = self.layers[layer_idx]("

MUTANTS = (
    Mutant("mask not shifted", *_mask("num_tokens = loss_mask.sum()"), "masks that are never shifted"),
    Mutant(
        "mask ignored in the sum",
        "mtp_loss = loss_mask * mtp_loss",
        "mtp_loss = 1.0 * mtp_loss",
        "sums of masked targets",
    ),
    Mutant("labels not shifted", LABELS, "        pass", "targets that are never shifted"),
    Mutant("labels shifted twice", LABELS, LABELS + "\n" + LABELS, "targets that are shifted twice"),
    Mutant("tokens not shifted", ROLLED_IDS, "        pass", "embeddings of tokens that are never"),
    Mutant(
        "tokens shifted twice",
        ROLLED_IDS,
        ROLLED_IDS + "\n" + ROLLED_IDS,
        "embeddings of tokens that are shifted twice",
    ),
    Mutant(
        "rolled end of a row not zeroed",
        "        rolled_tensor.select(dims, shifts).fill_(0)\n",
        "",
        "followed by its document's first",
    ),
    Mutant(
        "rolled end of a packed document not zeroed",
        "            rolled_seq[..., shifts:] = 0\n",
        "",
        "followed by its document's first",
        cases=((ONE, "packed"),),
    ),
    Mutant(
        "packed documents run together",
        "    if packed_seq_params is not None:\n        return _roll_tensor_packed_seq(",
        "    if False:\n        return _roll_tensor_packed_seq(",
        "run into each other",
        cases=((ONE, "packed"),),
    ),
    Mutant(
        "lambda not divided by depths",
        "config.mtp_loss_scaling_factor / config.mtp_num_layers",
        "config.mtp_loss_scaling_factor",
        "weigh 2 times",
    ),
    Mutant(
        "no lambda",
        "config.mtp_loss_scaling_factor / config.mtp_num_layers",
        "1.0 / config.mtp_num_layers",
        "weigh 10 times",
    ),
    Mutant(
        "lambda twice",
        PLAIN,
        PLAIN.replace("mtp_loss_scale", "config.mtp_loss_scaling_factor * mtp_loss_scale"),
        "weigh 0.1 times",
    ),
    Mutant("MTP loss dropped", PLAIN, PLAIN.replace("mtp_loss_scale", "0.0 * mtp_loss_scale"), "weigh 0 times"),
    Mutant(
        "sum divided by the main loss's targets",
        PLAIN,
        PLAIN.replace("safe_num_tokens", "original_num_tokens"),
        "main loss",
    ),
    Mutant("sum divided by all positions", PLAIN, PLAIN.replace("safe_num_tokens", "mtp_loss.numel()"), "positions"),
    Mutant("sum not divided", PLAIN, PLAIN.replace(" / safe_num_tokens", ""), "nothing"),
    Mutant(
        "per-token loss without its factor",
        "mtp_loss_scale * mtp_loss * (original_num_tokens / num_tokens_safe)",
        "mtp_loss_scale * mtp_loss",
        "main loss",
        more="--calculate-per-token-loss",
    ),
    Mutant(
        "log of sums",
        "            ) / num_tokens.clamp(min=1)\n",
        "            )\n",
        "log",
    ),
    Mutant(
        "log twice as large",
        'tracker["loss_values"][layer_number] += loss.detach()',
        'tracker["loss_values"][layer_number] += 2 * loss.detach()',
        "log of 2 times",
    ),
    Mutant(
        "hidden state in front",
        CONCATENATED,
        "torch.cat((hidden_states, decoder_input), -1)",
        "[hidden state; embedding]",
    ),
    Mutant("no hnorm", "apply_module(self.hnorm)(hidden_states)", "hidden_states", "without hnorm"),
    Mutant("no enorm", "apply_module(self.enorm)(decoder_input)", "decoder_input", "without enorm"),
    Mutant(
        "no final norm", "apply_module(self.final_layernorm)(hidden_states)", "hidden_states", "without final_layernorm"
    ),
    Mutant(
        "hnorm in the place of enorm",
        "apply_module(self.enorm)(decoder_input)",
        "apply_module(self.hnorm)(decoder_input)",
        "",
    ),
    Mutant(
        "every depth from the trunk",
        CALLED,
        "            hidden_states = hidden_states_list[0]\n" + CALLED,
        "trunk's hidden state",
    ),
    Mutant(
        "trunk detached",
        CALLED,
        "            hidden_states = hidden_states if iteration else hidden_states.detach().requires_grad_()\n"
        + CALLED,
        "no gradient to the trunk",
    ),
    Mutant(
        "embedding detached",
        "decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)",
        "decoder_input = embedding(input_ids=input_ids, position_ids=position_ids).detach()",
        "no gradient to the embedding",
    ),
    Mutant(
        "output layer detached",
        "            weight=output_weight,\n"
        "            runtime_gather_output=runtime_gather_output,\n        )\n        if scale",
        "            weight=(output_layer.weight if output_weight is None else output_weight).detach(),\n"
        "            runtime_gather_output=runtime_gather_output,\n        )\n        if scale",
        "no gradient to the output layer",
    ),
    Mutant(
        "last depth alone",
        PLAIN,
        PLAIN.replace("mtp_loss_scale", "(mtp_layer_number == 1) * mtp_loss_scale"),
        "last depth alone",
    ),
    Mutant(
        "scale without microbatches",
        "MTPLossAutoScaler.main_loss_backward_scale = scale",
        "MTPLossAutoScaler.main_loss_backward_scale = scale * 3",
        "number of microbatches",
    ),
    Mutant(
        "no exchange between context-parallel ranks",
        "rolled_tensor_list[i][tuple(index)] = tensor_recv_list[i]",
        "rolled_tensor_list[i][tuple(index)] = 0",
        "within a context-parallel chunk",
        cases=((CP, "holes"),),
    ),
    Mutant(
        "scale divided by the context-parallel size",
        "MTPLossAutoScaler.main_loss_backward_scale = scale",
        "MTPLossAutoScaler.main_loss_backward_scale = scale / parallel_state.get_context_parallel_world_size()",
        "weigh 1/2",
        cases=((CP, "holes"),),
    ),
    Mutant(
        "gradient of the DP ranks doubled",
        "MTPLossAutoScaler.main_loss_backward_scale = scale",
        "MTPLossAutoScaler.main_loss_backward_scale = scale * parallel_state.get_data_parallel_world_size()",
        "data-parallel size",
        cases=((DP, "holes"),),
    ),
    Mutant(
        "copy of the embedding not summed",
        "def _allreduce_embedding_grad(",
        "def _allreduce_embedding_grad(*_, **__):\n    pass\n\n\ndef _unused_embedding_grad(",
        "copy on the stage of the MTP layers",
        "distributed/finalize_model_grads.py",
        ((PP, "holes"),),
    ),
)

CURES = (
    Mutant(
        "padded offsets",
        "cu_seqlens = packed_seq_params.cu_seqlens_q\n",
        "padded = packed_seq_params.cu_seqlens_q_padded\n"
        "    cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded\n",
        "",
        cases=((ONE, "padded"),),
    ),
    Mutant(
        "counts of all context-parallel ranks",
        "        mtp_loss = loss_mask * mtp_loss\n",
        "        mtp_loss = loss_mask * mtp_loss\n"
        "        if cp_group is not None and cp_group.size() > 1:\n"
        "            num_tokens = num_tokens.clone()\n"
        "            torch.distributed.all_reduce(num_tokens, group=cp_group)\n"
        "            mtp_loss = mtp_loss * cp_group.size()  # DDP and the log average over these ranks\n"
        "            if mtp_layer_number == 0:\n"
        "                original_num_tokens = original_num_tokens.clone() / cp_group.size()\n"
        "                torch.distributed.all_reduce(original_num_tokens, group=cp_group)\n",
        "",
        cases=((CP, "rows"), (CP, "holes"), (CP, "packed")),
    ),
)
"""Fixes for the faults of Megatron-Core 0.19.2, in the form of a mutant, after which its cases are right."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[Path]:
    """Create a folder with the installed Megatron-Core and this fault."""
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    core = Path(spec.origin).parent
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name, "megatron/core")
        shutil.copytree(core, copy, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / mutant.file
        text = file.read_text()
        assert mutant.old in text, f"{mutant.name}: {mutant.file} has no longer what the fault replaces"
        file.unlink()  # a link to the installed file
        file.write_text(text.replace(mutant.old, mutant.new, 1))
        yield Path(name)


def proof_of(mutant: Mutant) -> Proof:
    """Return what `prove` finds in the mutant's cases."""
    tiny = shrink(f"{FLAGS} {mutant.more}".split())
    cases = [Case(layout, batch, bool(tiny.config["calculate_per_token_loss"])) for layout, batch in mutant.cases]
    with planted(mutant) as folder:
        return prove(tiny, cases, {}, folder, seconds=60)


def main(names: list[str]) -> None:
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        proof = proof_of(mutant)
        wrong = [verdict for verdict in proof.verdicts if verdict.status == WRONG]
        causes = [verdict.cause.words if verdict.cause else verdict.words for verdict in wrong]
        named = bool(mutant.cause) and any(mutant.cause in words for words in causes)
        print(
            mutant.name,
            "found" if wrong else "MISSED",
            "named" if named else "not named",
            causes,
            sep=" | ",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
