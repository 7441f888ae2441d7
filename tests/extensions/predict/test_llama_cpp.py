"""Predicted acceptance in llama.cpp matches within two points: its last round of an output makes fewer drafts.

Optional: `scripts/test_llama_cpp.sh` installs its bindings into a separate environment and runs this; otherwise
skipped.
"""

import json
import random
from functools import reduce
from operator import add
from pathlib import Path

import launch
import pytest
from test_vllm import EXPERTS

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.extensions.predict.acceptance import Sample, accepted
from megatron_mtp.extensions.predict.engines import ENGINES
from megatron_mtp.extensions.predict.rows import greedy, read_text
from megatron_mtp.megatron.runtime import prepare

prepare()

PYTHON = launch.ROOT / ".venv-llama" / "bin" / "python"
CLIENT = Path(__file__).parent / "llama_cpp_client.py"
NEW, COUNTS = 100, (1, 2, 3)
RUN = (
    "--mtp-num-layers 1 --train-iters 30 --lr 3e-3 --eval-interval 1000 --eval-iters 1 --save-interval 30 "
    "--init-method-std 0.1 --untie-embeddings-and-output-weights --max-position-embeddings 256"
).split()
MODELS = {"dense": "--ffn-hidden-size 128 --qk-layernorm", "experts": f"{EXPERTS} --add-qkv-bias"}

pytestmark = pytest.mark.skipif(
    not (PYTHON.parents[1] / "installed").exists(),
    reason="llama.cpp is not installed; scripts/test_llama_cpp.sh installs it into .venv-llama and runs this",
)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_accepts_what_is_predicted(name: str, tmp_path: Path) -> None:
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    launch.run(launch.pretrain(*RUN, *MODELS[name].split(), "--save", str(checkpoint)), tmp_path / "train.log")
    mcore_to_hf(checkpoint, exported, Options(quiet=True), form_of(checkpoint, family="glm4_moe"))
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 120) for _ in range(8)] for _ in range(6)]
    words = [str(exported), str(tmp_path / "model.gguf"), json.dumps(prompts), str(NEW), json.dumps(COUNTS)]
    shown = launch.run([str(PYTHON), str(CLIENT), *words], tmp_path / "llama.log")
    served = [json.loads(line) for line in shown.splitlines() if line[:1] == "{"]
    assert [each["drafts"] for each in served] == list(COUNTS)
    model = load_model(checkpoint)
    samples = [Sample(greedy(model, prompt, NEW + max(COUNTS) + 1), 8, 8 + NEW) for prompt in prompts]
    for each in served:
        assert each["tokens"] == [sample.tokens[8 : 8 + NEW] for sample in samples]
        count, feeding = each["drafts"], ENGINES["llama.cpp"].feeding("glm4_moe", 1)
        parts = [accepted(model, read_text(model, sample.tokens), sample, count, feeding) for sample in samples]
        ours, theirs = reduce(add, parts).accepted_per_forward / count, each["accepted"] / each["proposed"]
        counts = f"llama.cpp {each['accepted']} of {each['proposed']}, {theirs:.4f}; ours {ours:.4f}"
        print(f"{name}, {count} drafts: {counts}")
        assert theirs == pytest.approx(ours, abs=0.02)
        assert 0.05 < ours < 0.95  # all or no drafts accepted would show nothing
