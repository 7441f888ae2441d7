"""Trained checkpoints in vLLM for CPU: it emits the tokens that we compute, and accepts the drafts that we foretell.

Optional: `scripts/test_vllm.sh` installs vLLM into an environment of its own and runs this; else it is skipped.

vLLM's runner for CPU makes every draft of a round with depth 1, which it feeds with its own state; whether that is the
state before or after the final norm differs by family, and the embedding at position 0 counts as zero. `Convention`
says so, and `foretold` does the same with Megatron's modules, teacher-forced on the tokens that vLLM emitted.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import launch
import pytest
import torch
from torch import Tensor

from megatron_mtp.checkpoint.convert.exporting import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.importing import Options
from megatron_mtp.checkpoint.mcore.model import load_model
from megatron_mtp.model.mtp import AttentionInputs
from megatron_mtp.model.trunk import MTPGPTModel
from megatron_mtp.platform import prepare

prepare()

PYTHON = launch.ROOT / ".venv-vllm" / "bin" / "python"
CLIENT = Path(__file__).parent / "vllm_client.py"
PROMPT, NEW, DRAFTS, VOCABULARY = [3, 4, 5, 6], 160, (1, 2, 3), 127

pytestmark = pytest.mark.skipif(
    not (PYTHON.parents[1] / "installed").exists(),
    reason="vLLM for CPU is not installed; scripts/test_vllm.sh installs it into .venv-vllm and runs this",
)


@dataclass(frozen=True)
class Convention:
    """What vLLM feeds depth 1 with.

    Attributes:
        trunk: the trunk's state is that "after" or "before" its final norm.
        chained: the same of the depth's own state, from the second draft on.
    """

    trunk: str
    chained: str


@dataclass(frozen=True)
class Case:
    family: str
    flags: str
    convention: Convention


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1] "
    "--moe-router-load-balancing-type none --moe-token-dispatcher-type allgather"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32 --qk-layernorm --rope-type rope"
)
CASES = {
    "dense": Case("glm4_moe", "--ffn-hidden-size 128 --qk-layernorm", Convention("after", "before")),
    "experts": Case("glm4_moe", f"{EXPERTS} --add-qkv-bias", Convention("after", "before")),
    "latent": Case("deepseek_v3", f"{EXPERTS} {LATENT}", Convention("after", "after")),
    "mimo": Case("mimo", "--ffn-hidden-size 128 --add-qkv-bias --mtp-num-layers 1", Convention("before", "after")),
}
# vLLM's attention for CPU knows heads of 32 and more.
RUN = (
    "--num-attention-heads 2 --kv-channels 32 --max-position-embeddings 256 --mtp-num-layers 3 --train-iters 30 "
    "--lr 3e-3 --eval-interval 1000 --eval-iters 1 --save-interval 30 --init-method-std 0.1 "
    "--untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize("name", CASES)
def test_vllm_accepts_what_was_trained(name: str, tmp_path: Path) -> None:
    case, checkpoint, exported = CASES[name], tmp_path / "checkpoint", tmp_path / "exported"
    flags = [*RUN.split(), *case.flags.split(), "--save", str(checkpoint)]
    launch.run(launch.pretrain(*flags), tmp_path / "train.log")
    mcore_to_hf(checkpoint, exported, Options(quiet=True), form_of(checkpoint, family=case.family))
    command = [str(PYTHON), str(CLIENT), str(exported), json.dumps(PROMPT), str(NEW), json.dumps(DRAFTS)]
    served = [json.loads(line) for line in launch.run(command, tmp_path / "vllm.log").splitlines() if line[:1] == "{"]
    assert [each["drafts"] for each in served] == list(DRAFTS)
    model = load_model(checkpoint)
    for each in served:
        drafts, tokens = each["drafts"], each["tokens"]
        assert tokens == greedy(model, PROMPT, NEW)
        ours = foretold(model, tokens, each["proposed"] // drafts, drafts, case.convention)
        print(f"{name}, {drafts} drafts: vLLM {each['accepted'] / each['proposed']:.4f}, ours {ours:.4f}")
        assert each["accepted"] / each["proposed"] == pytest.approx(ours, abs=0.01)
        assert 0.05 < ours < 0.95  # all or none accepted would say nothing of the drafts


@torch.no_grad()
def greedy(model: MTPGPTModel, prompt: list[int], new: int) -> list[int]:
    """Prompt and continuation, by whole forwards of the trunk."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(_argmax(model, _trunk(model, tokens, "after")[-1:]))
    return tokens


@torch.no_grad()
def foretold(model: MTPGPTModel, tokens: list[int], rounds: int, drafts: int, convention: Convention) -> float:
    """Part of the drafts that are accepted in so many rounds, if vLLM drafts for these tokens and those that follow."""
    whole = greedy(model, tokens, drafts)
    trunk_SBH = _trunk(model, whole, convention.trunk)
    known, accepted = len(PROMPT) + 1, 0
    for _ in range(rounds):
        made = _drafts(model, trunk_SBH[: known - 1], whole[1:], drafts, convention.chained)
        right = [draft == token for draft, token in zip(made, whole[known:], strict=False)]
        kept = right.index(False) if False in right else drafts
        accepted, known = accepted + kept, known + kept + 1
    return accepted / (rounds * drafts)


def _drafts(model: MTPGPTModel, states_SBH: Tensor, following: list[int], drafts: int, chained: str) -> list[int]:
    """Drafts of depth 1 behind these slots: a slot gets the token after it, and a slot of a draft the state before."""
    layer, made = model.mtp.layers[0], []
    for _ in range(drafts):
        embedded_SBH = _embed(model, following[: states_SBH.size(0)])
        embedded_SBH[0] = 0
        with _input_of(layer.final_layernorm) as before:
            after_SBH = layer(states_SBH, embedded_SBH, _attention(model, states_SBH.size(0)))
        made.append(_argmax(model, after_SBH[-1:]))
        state_SBH = after_SBH if chained == "after" else before[0]
        states_SBH = torch.cat([states_SBH, state_SBH[-1:]])
    return made


def _trunk(model: MTPGPTModel, tokens: list[int], side: str) -> Tensor:
    """[S, B, H], after or before the final norm."""
    attention = _attention(model, len(tokens))
    with _input_of(model.decoder.final_layernorm) as before:
        after_SBH = model.decoder(
            hidden_states=_embed(model, tokens),
            attention_mask=attention.attention_mask,
            rotary_pos_emb=attention.rotary_pos_emb,
        )
    return after_SBH if side == "after" else before[0]


def _attention(model: MTPGPTModel, slots: int) -> AttentionInputs:
    mask = torch.ones(1, 1, slots, slots).tril().logical_not()
    latent = model.config.multi_latent_attention  # makes its own angles
    return AttentionInputs(attention_mask=mask, rotary_pos_emb=None if latent else model.rotary_pos_emb(slots))


def _embed(model: MTPGPTModel, tokens: list[int]) -> Tensor:
    positions_BS = torch.arange(len(tokens)).unsqueeze(0)
    return model.embedding(input_ids=torch.tensor([tokens]), position_ids=positions_BS).clone()


def _argmax(model: MTPGPTModel, state_SBH: Tensor) -> int:
    return int(model.head(None).project(state_SBH)[0, 0, :VOCABULARY].argmax())


@contextmanager
def _input_of(module: torch.nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    yield seen
    handle.remove()
