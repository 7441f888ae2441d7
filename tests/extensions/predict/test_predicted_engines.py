"""Predicted acceptance in transformers matches: exported models with one, two and three drafts per round.

Predicted acceptance in vLLM's runner V2 matches our own decoder, since both run two MTP layers the same way.
"""

import json
from pathlib import Path

import launch
import pytest
from test_vllm import EXPERTS, LATENT

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.extensions.predict.acceptance import Sample, accepted, rounds
from megatron_mtp.extensions.predict.engines import ENGINES
from megatron_mtp.extensions.predict.rows import drafts, greedy, read_text
from megatron_mtp.megatron.runtime import prepare

prepare()

pytestmark = pytest.mark.usefixtures("forked_python")

CLIENT = launch.ROOT / "tests" / "support" / "mtp_client.py"
PROMPT, NEW, COUNTS = [3, 4, 5, 6], 120, (1, 2, 3)
RUN = (
    "--mtp-num-layers 3 --train-iters 30 --lr 3e-3 --eval-interval 1000 --eval-iters 1 --save-interval 30 "
    "--init-method-std 0.1 --untie-embeddings-and-output-weights --max-position-embeddings 256"
).split()
MODELS = {
    "dense": ("glm4_moe", "--ffn-hidden-size 128 --qk-layernorm"),
    "experts": ("glm4_moe", f"{EXPERTS} --add-qkv-bias"),
    "latent": ("deepseek_v3", f"{EXPERTS} {LATENT}"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["dense", "experts", "latent"])
def test_transformers_accepts_what_is_predicted(name: str, tmp_path: Path) -> None:
    (family, kind), checkpoint, exported = MODELS[name], tmp_path / "checkpoint", tmp_path / "exported"
    flags = [*RUN, *kind.split(), "--save", str(checkpoint)]
    launch.run(launch.pretrain(*flags), tmp_path / "train.log")
    mcore_to_hf(checkpoint, exported, Options(quiet=True), form_of(checkpoint, family=family))
    model = load_model(checkpoint)
    whole = greedy(model, PROMPT, NEW + max(COUNTS) + 1)
    for count in COUNTS:
        command = launch.python(CLIENT, str(exported), json.dumps(PROMPT), str(NEW), str(count))
        theirs = json.loads(launch.run(command, tmp_path / f"client-{count}.log").strip().splitlines()[-1])
        assert theirs["with"] == theirs["without"] == whole[: len(PROMPT) + NEW]
        sample = Sample(whole, len(PROMPT), len(PROMPT) + NEW)
        feeding = ENGINES["transformers"].feeding(family, count)
        ours = rounds(drafts(model, read_text(model, whole), count, feeding), sample)
        kept = theirs["accepted"][1:]  # the trunk's first token has no draft
        print(f"{name}, {count} drafts: transformers kept {kept}, ours {ours}")
        assert kept[:-1] == ours[:-1]  # transformers limits the last round to the remaining tokens
        assert len(kept) == len(ours)
        assert 0.05 < sum(ours) / (count * len(ours)) < 0.95  # all or no drafts accepted would show nothing


@pytest.mark.matrix
def test_runner_v2_of_vllm_is_predicted_to_accept_what_our_decoder_accepts(tmp_path: Path) -> None:
    """With two MTP layers; DeepSeek-V3's class passes on states after the norm, as training does."""
    (family, kind), checkpoint = MODELS["latent"], tmp_path / "checkpoint"
    flags = [*RUN, "--mtp-num-layers", "2", *kind.split(), "--save", str(checkpoint)]
    launch.run(launch.pretrain(*flags), tmp_path / "train.log")
    model, runner = load_model(checkpoint), load_runner(checkpoint)
    whole = greedy(model, PROMPT, NEW + 3)
    sample, text = Sample(whole, len(PROMPT), len(PROMPT) + NEW), read_text(model, whole)
    feeding = ENGINES["vllm-v2"].feeding(family, 2)
    for count in (1, 2):
        theirs = accepted(model, text, sample, count, feeding).accepted_at
        config = {"method": "mtp", "num_speculative_tokens": count}
        ours = generate(runner, [PROMPT], NEW, speculative=config).stats.accepted_at
        print(f"{count} drafts: vLLM's runner V2 is predicted to keep {theirs}, our decoder keeps {ours}")
        assert theirs == pytest.approx(ours, abs=1)  # our last round is limited to the remaining tokens
