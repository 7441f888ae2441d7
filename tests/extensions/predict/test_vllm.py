"""Trained checkpoints in vLLM for CPU: it loads what an audit finds intact, outputs the tokens that we compute, and
accepts the drafts that we predict.

Optional: `scripts/test_vllm.sh` installs vLLM into a separate environment and runs this; otherwise skipped.

`ENGINES` (extensions/predict/engines.py) has vLLM's inputs to the MTP layers of each family. Its rules run with
Megatron's modules on vLLM's output tokens, and on those that our greedy decoding appends.
"""

import json
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from hf_models import make
from megatron.core.models.common.language_module.language_module import LanguageModule
from safetensors.torch import save_file

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.live import export_hf_weights
from megatron_mtp.checkpoint.convert.quantizing import Quantize
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli.convert import main as convert
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.extensions.predict.acceptance import Sample, accepted
from megatron_mtp.extensions.predict.engines import ENGINES
from megatron_mtp.extensions.predict.rows import greedy, read_text
from megatron_mtp.megatron.runtime import prepare

prepare()

PYTHON = launch.ROOT / ".venv-vllm" / "bin" / "python"
CLIENT = Path(__file__).parent / "vllm_client.py"
PROMPT, NEW, DRAFTS = [3, 4, 5, 6], 160, (1, 2, 3)
MTP = '{"method": "mtp"}'

pytestmark = pytest.mark.skipif(
    not (PYTHON.parents[1] / "installed").exists(),
    reason="vLLM for CPU is not installed; scripts/test_vllm.sh installs it into .venv-vllm and runs this",
)


@dataclass(frozen=True)
class Case:
    family: str
    flags: str


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
    "dense": Case("glm4_moe", "--ffn-hidden-size 128 --qk-layernorm"),
    "experts": Case("glm4_moe", f"{EXPERTS} --add-qkv-bias"),
    "latent": Case("deepseek_v3", f"{EXPERTS} {LATENT}"),
    "mimo": Case("mimo", "--ffn-hidden-size 128 --add-qkv-bias --mtp-num-layers 1"),
}
# vLLM's CPU attention supports heads of 32 and more.
RUN = (
    "--num-attention-heads 2 --kv-channels 32 --max-position-embeddings 256 --mtp-num-layers 3 --train-iters 30 "
    "--lr 3e-3 --eval-interval 1000 --eval-iters 1 --save-interval 30 --init-method-std 0.1 "
    "--untie-embeddings-and-output-weights"
)
FROM_FOLDER = (
    "--use-checkpoint-args --finetune --micro-batch-size 2 --global-batch-size 4 --seq-length 64 "
    "--lr 3e-3 --eval-interval 1000 --eval-iters 1 --mock-data --tokenizer-type NullTokenizer "
    "--moe-token-dispatcher-type allgather"
)
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ROUTED = {"moe_intermediate_size": 32}
IMPORTED: dict[str, tuple[int, dict[str, Any]]] = {
    "glm4_moe_lite": (12, {**ROUTED, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}),
    "hy_v3": (36, {**ROUTED, "first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True, "qk_norm": True}),
}
"""For each kind of `hf_models`, named like its family: training steps, after which some drafts are accepted but not
all, and changes of its configuration; those of hy_v3 are keys that vLLM reads and transformers does not write.
"""
KINDS = {
    "eagle3": "--drafter eagle3 --drafter-steps 3",
    "eagle": "--drafter eagle --drafter-steps 3",
    "dflash": "--drafter dflash --drafter-steps 3 --drafter-num-layers 2 --drafter-mask-token 0 --drafter-blocks 8",
}


def generated(
    folder: Path, log: Path, drafts: Iterable[int], *more: str, method: str = MTP, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """Return vLLM's tokens and counters for each of these numbers of drafts."""
    command = [str(PYTHON), str(CLIENT), str(folder), json.dumps(PROMPT), str(NEW), json.dumps([*drafts])]
    printed = launch.run([*command, method, dtype, *more], log).splitlines()
    return [json.loads(line) for line in printed if line[:1] == "{"]


@pytest.mark.parametrize("name", CASES)
def test_vllm_accepts_what_was_trained(name: str, tmp_path: Path) -> None:
    case, checkpoint, exported = CASES[name], tmp_path / "checkpoint", tmp_path / "exported"
    flags = [*RUN.split(), *case.flags.split(), "--save", str(checkpoint)]
    launch.run(launch.pretrain(*flags), tmp_path / "train.log")
    mcore_to_hf(checkpoint, exported, Options(quiet=True), form_of(checkpoint, family=case.family))
    assert audit(exported)["ok"]
    served = generated(exported, tmp_path / "vllm.log", DRAFTS)
    assert [each["drafts"] for each in served] == list(DRAFTS)
    agree(load_model(checkpoint), served, case.family, name)


@pytest.mark.parametrize("family", IMPORTED)
def test_vllm_accepts_what_is_predicted_of_a_trained_folder(family: str, tmp_path: Path) -> None:
    """A random folder of the family is imported, trained, exported and served."""
    source, mcore, saved, exported = (tmp_path / name for name in ("source", "mcore", "saved", "exported"))
    steps, changes = IMPORTED[family]
    make(source, family, 1, changes={**SIZES, **changes})
    hf_to_mcore(source, mcore, Options(quiet=True))
    length = ["--train-iters", str(steps), "--save-interval", str(steps)]
    flags = [*FROM_FOLDER.split(), *length, "--load", str(mcore), "--save", str(saved)]
    launch.run(launch.python("pretrain_gpt.py", *flags), tmp_path / "train.log")
    mcore_to_hf(saved, exported, Options(quiet=True), form_of(saved, like=mcore))
    agree(load_model(saved), generated(exported, tmp_path / "vllm.log", DRAFTS), family, family)


def agree(model: LanguageModule, served: list[dict[str, Any]], family: str, name: str, off: int = 0) -> None:
    """Check that vLLM's tokens are our greedy ones, and that it accepts the predicted number of drafts, plus or minus
    `off`.
    """
    feeding = ENGINES["vllm"].feeding(family, len(model.mtp.layers))
    whole = greedy(model, PROMPT, NEW + max(DRAFTS) + 1)
    for each in served:
        drafts, tokens = each["drafts"], each["tokens"]
        assert tokens == whole[: len(tokens)]
        sample = Sample(whole, len(PROMPT), len(PROMPT) + NEW)
        ours = accepted(model, read_text(model, whole), sample, drafts, feeding)
        print(f"{name}, {drafts} drafts: {each['accepted_per_position']} of {each['proposed']}; ours {ours}")
        assert each["proposed"] == ours.target_forwards * drafts
        assert each["accepted_per_position"] == pytest.approx(ours.accepted_at, abs=off)
        assert 0.05 < ours.accepted_per_forward / drafts < 0.95  # all or no drafts accepted would show nothing


def test_vllm_accepts_what_is_predicted_of_a_hybrid_and_of_its_drafter(tmp_path: Path) -> None:
    """Qwen3.5 in bfloat16, the only dtype of vLLM's delta rule on CPUs; its heads have the published sizes."""
    source, mcore, saved, exported = (tmp_path / name for name in ("source", "mcore", "saved", "exported"))
    with_drafter, beside = tmp_path / "with_drafter", tmp_path / "beside"
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    make(source, "qwen3_5_text", 1, changes={**SIZES, **heads, "hidden_size": 48})
    hf_to_mcore(source, mcore, Options(quiet=True))
    drafter = [*KINDS["eagle3"].split(), *"--drafter-layers 1 2 3".split()]
    for load, save, more in ((mcore, saved, []), (saved, with_drafter, drafter)):
        flags = [*FROM_FOLDER.split(), *"--train-iters 32 --save-interval 32".split(), *more]
        flags += ["--load", str(load), "--save", str(save)]
        launch.run(launch.python("pretrain_gpt.py", *flags), tmp_path / "train.log")
    mcore_to_hf(saved, exported, Options(quiet=True), form_of(saved, like=mcore))
    assert convert(["drafter-to-hf", str(with_drafter), str(beside)]) == 0
    log = tmp_path / "vllm.log"
    agree(load_model(saved), generated(exported, log, (1, 3), dtype="bfloat16"), "qwen3_5", "qwen3_5", off=1)
    method = json.dumps({"method": "eagle3", "model": str(beside)})
    (each,) = generated(exported, log, [3], method=method, dtype="bfloat16")
    agrees_with_our_engine("eagle3", each, load_runner(with_drafter))


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_accepts_the_same_drafts_of_a_drafter_as_our_engine(kind: str, tmp_path: Path) -> None:
    """The same tokens and accepted drafts on the exported trunk, except drafts beyond the output's end."""
    trunk, saved, exported, beside = (tmp_path / name for name in ("trunk", "saved", "exported", "beside"))
    common = ["--num-layers", "8", *RUN.replace("--mtp-num-layers 3", "").split()]
    for flags in (["--save", str(trunk)], ["--load", str(trunk), "--save", str(saved), *KINDS[kind].split()]):
        launch.run(launch.Command("pretrain_gpt.py", (*launch.PLAIN_RUN, *common, *flags)), tmp_path / "train.log")
    mcore_to_hf(trunk, exported, Options(quiet=True), form_of(trunk))
    assert convert(["drafter-to-hf", str(saved), str(beside)]) == 0
    method, runner = json.dumps({"method": kind, "model": str(beside)}), load_runner(saved)
    for each in generated(exported, tmp_path / "vllm.log", [3], method=method):
        agrees_with_our_engine(kind, each, runner)


def agrees_with_our_engine(kind: str, each: dict[str, Any], runner: Runner) -> None:
    """The last rounds differ: vLLM makes all drafts, we make as many as there are tokens left."""
    ours = generate(runner, [PROMPT], NEW, speculative={"method": kind, "num_speculative_tokens": each["drafts"]})
    theirs, stats = sum(each["accepted_per_position"]), ours.stats
    print(f"{kind}: {theirs} of {each['proposed']}; ours {stats.accepted} of {stats.drafted}")
    assert each["tokens"] == [*PROMPT, *ours.token_ids[0]]
    count = each["drafts"]
    assert each["proposed"] == pytest.approx(stats.drafted, abs=sum(range(1, count + 1)))
    assert theirs == pytest.approx(stats.accepted, abs=count)
    assert theirs


def test_vllm_drafts_with_a_quantized_export_and_its_ignore_list(tmp_path: Path) -> None:
    """Per-row FP8, which vLLM's CPU build runs without AMX; the MTP layer is unquantized, and listed under vLLM's name.

    Without that name vLLM takes the layer for quantized, and accepts almost no draft; the audit reports this
    beforehand.
    """
    saved, exported, spoiled = (tmp_path / name for name in ("checkpoint", "exported", "spoiled"))
    flags = [*RUN.split(), *CASES["mimo"].flags.split(), "--save", str(saved)]
    launch.run(launch.pretrain(*flags), tmp_path / "train.log")
    options = Options(quiet=True, dtype=torch.bfloat16, quantize=Quantize("fp8-channel", "bfloat16"))
    mcore_to_hf(saved, exported, options, form_of(saved, family="mimo"))
    shutil.copytree(exported, spoiled)
    keys = json.loads((spoiled / "config.json").read_text())
    says = keys["quantization_config"]
    says["ignore"] = [name for name in says["ignore"] if "model.layers." not in name]
    (spoiled / "config.json").write_text(json.dumps(keys))
    rates = []
    for folder, sound in ((exported, True), (spoiled, False)):
        assert audit(folder)["ok"] == sound
        (served,) = generated(folder, tmp_path / "vllm.log", [1])
        rates.append(served["accepted_per_position"][0] / served["proposed"])
    hf_to_mcore(exported, tmp_path / "read", Options(quiet=True))
    model, tokens = load_model(tmp_path / "read"), greedy(load_model(tmp_path / "read"), PROMPT, NEW + 2)
    sample = Sample(tokens, len(PROMPT), len(PROMPT) + NEW)
    ours = accepted(model, read_text(model, tokens), sample, 1, ENGINES["vllm"].feeding("mimo", 1))
    assert rates[0] == pytest.approx(ours.accepted_per_forward, abs=0.15)  # vLLM also rounds rows of activations
    assert rates[1] < 0.1


def test_vllm_takes_the_weights_of_a_later_step_without_a_restart(tmp_path: Path) -> None:
    """From `export_hf_weights`: trunk and MTP layers draft like the later checkpoint, not like the original folder.

    The model has no experts: after a reload, vLLM for CPU accepted fewer drafts of MTP layers with experts.
    """
    case, saved, exported = CASES["mimo"], tmp_path / "saved", tmp_path / "exported"
    flags = [*RUN.split(), *case.flags.split(), "--save", str(saved), *"--train-iters 40 --save-interval 20".split()]
    launch.run(launch.pretrain(*flags), tmp_path / "train.log")
    mcore_to_hf(saved / "iter_0000020", exported, Options(quiet=True), form_of(saved, family=case.family))
    later, files = load_model(saved / "iter_0000040"), [tmp_path / "model.safetensors", tmp_path / "mtp.safetensors"]
    for only_mtp, file in enumerate(files):
        stream = export_hf_weights(later, like=exported, only_mtp=bool(only_mtp))
        save_file({name: tensor.contiguous() for name, tensor in stream}, file)
    (served,) = generated(exported, tmp_path / "vllm.log", [2], *map(str, files))
    agree(later, [served], case.family, "after")
    with pytest.raises(AssertionError):
        agree(load_model(saved / "iter_0000020"), [served], case.family, "before")


def test_vllm_and_audit_reject_a_missing_file(tmp_path: Path) -> None:
    """Both reject an incomplete folder: an index that names a missing file."""
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    flags = [*RUN.split(), *CASES["dense"].flags.split(), "--save", str(checkpoint)]
    launch.run(launch.pretrain(*flags), tmp_path / "train.log")
    small = Options(quiet=True, shard_bytes=200_000)
    mcore_to_hf(checkpoint, exported, small, form_of(checkpoint, family="glm4_moe"))
    assert audit(exported)["ok"]
    gone = sorted(exported.glob("*.safetensors"))[-1]
    gone.unlink()
    (found,) = [one for one in audit(exported)["findings"] if one["guess"] == "damaged file"]
    assert gone.name in found["says"]
    command = [str(PYTHON), str(CLIENT), str(exported), json.dumps(PROMPT), "8", "[1]", MTP, "float32"]
    assert subprocess.run(command, capture_output=True).returncode != 0
