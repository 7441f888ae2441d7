"""Whole commands: drafters are trained on a trunk, resumed, exported, attached again, and draft."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch
import pytest
import torch
from drafting_single import trained_forward
from hf_models import make
from safetensors.torch import load_file, save_file
from tiers import tiered
from torch import Tensor
from written_datasets import write_dataset

from megatron_mtp.checkpoint.convert.drafter_form import read_drafter
from megatron_mtp.checkpoint.inspecting import inspect
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli import attach
from megatron_mtp.cli.convert import main as convert
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.decoding.method import config_from
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.training import loading

prepare()

STEPS, HALF, LAYERS = 4, 2, 8
DRAFTED = Path(__file__).parents[1] / "support" / "draft_tokens.txt"
SLICES, STAGES = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"


def command(*flags: str, processes: int = 1) -> launch.Command:
    """Return the command of a tiny trunk of eight layers, with grouped queries and an untied head."""
    return launch.Command(
        "pretrain_gpt.py",
        (
            *launch.PLAIN_RUN,
            *f"--num-layers {LAYERS} --group-query-attention --num-query-groups 2".split(),
            *f"--untie-embeddings-and-output-weights --train-iters {STEPS} --save-interval {HALF}".split(),
            *"--attention-dropout 0 --hidden-dropout 0 --eval-interval 100 --eval-iters 0 --log-interval 1".split(),
            *"--make-vocab-size-divisible-by 64".split(),
            *flags,
        ),
        processes,
    )


DRAFTER = f"--drafter eagle3 --drafter-steps 3 --mtp-draft-vocab-file {DRAFTED}".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with `trunk` and `drafter`; the drafter was also saved after two of four steps."""
    folder = tmp_path_factory.mktemp("drafter")
    launch.run(command("--save", f"{folder}/trunk"), folder / "trunk.log")
    flags = ["--load", f"{folder}/trunk", "--save", f"{folder}/drafter", "--mtp-acceptance-interval", "1"]
    log = launch.run(command(*flags, *DRAFTER), folder / "drafter.log")
    assert f"> a new drafter on the trunk of {folder}/trunk/iter_0000004; starting as with --finetune" in log
    assert "mtp_3 loss" in log
    return folder


def tensors_of(checkpoint: Path, state: bool = False) -> dict[str, Tensor]:
    reader = DistReader(checkpoint)
    return {key: reader.read(key) for key in (*reader.keys, *(reader.state_keys if state else ()))}


def test_training_a_drafter_keeps_the_trunk_and_starts_from_its_head(trained: Path) -> None:
    trunk, whole = tensors_of(trained / "trunk"), tensors_of(trained / "drafter")
    assert [key for key, tensor in trunk.items() if not torch.equal(whole[key], tensor)] == []
    assert all(key.startswith("drafter.") for key in whole.keys() - trunk.keys())
    first = trunk["output_layer.weight"][whole["drafter.draft_vocabulary"]]
    assert 0 < (whole["drafter.head"] - first).abs().max() < 5e-3  # four steps of at most 1e-3


def test_a_run_resumes_to_the_same_bits(trained: Path, tmp_path: Path) -> None:
    flags = ["--load", f"{trained}/drafter", "--ckpt-step", str(HALF), "--save", f"{tmp_path}/resumed"]
    launch.run(command(*flags, *DRAFTER), tmp_path / "log")
    ours, theirs = (tensors_of(folder, state=True) for folder in (tmp_path / "resumed", trained / "drafter"))
    assert ours.keys() == theirs.keys()
    assert any("exp_avg" in key for key in theirs)
    assert [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)] == []


@pytest.mark.parametrize("layout", tiered([SLICES, STAGES], (STAGES,)))
def test_two_ranks_resume_a_run_of_one_rank(trained: Path, tmp_path: Path, layout: str) -> None:
    flags = ["--load", f"{trained}/drafter", "--ckpt-step", str(HALF), "--save", f"{tmp_path}/resumed"]
    launch.run(command(*flags, *layout.split(), *DRAFTER, processes=2), tmp_path / "log")
    ours, theirs = (tensors_of(folder) for folder in (tmp_path / "resumed", trained / "drafter"))
    far = {key: (ours[key] - theirs[key]).abs().max().item() for key in theirs if key.startswith("drafter.")}
    assert {key: value for key, value in far.items() if value > 1e-4} == {}


STILL = ["--lr", "0"]
"""Keeps weights at their initial values."""


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor], keys: Iterable[str]) -> bool:
    return all(torch.equal(ours[key], theirs[key]) for key in keys)


@pytest.mark.matrix
def test_a_fitted_drafter_gets_a_draft_vocabulary_with_trunk_rows(trained: Path, tmp_path: Path) -> None:
    corpus = write_dataset(tmp_path / "corpus", [list(range(3, 3 + length)) for length in range(40, 110)])
    assert convert(["fit-drafter", f"{trained}/trunk", f"{tmp_path}/fitted", "--data-path", corpus]) == 0
    flags = ["--load", f"{tmp_path}/fitted", "--save", f"{tmp_path}/trained"]
    log = launch.run(command(*flags, *DRAFTER, *STILL), tmp_path / "log")
    assert f"those of {DRAFTED}; starting as with --finetune" in log
    ours, theirs = tensors_of(tmp_path / "trained"), tensors_of(tmp_path / "fitted")
    assert ours.keys() - theirs.keys() == {"drafter.head", "drafter.draft_vocabulary"}
    assert same_bits(ours, theirs, theirs)
    assert torch.equal(ours["drafter.head"], theirs["output_layer.weight"][ours["drafter.draft_vocabulary"]])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--drafter-layers", "1", "2", "8"], "--drafter-layers is 1 2 8, and the trunk has 8 layers; give 3 rising"),
        (["--mtp-init", "random"], "given with --mtp-init, but a new drafter is drawn"),
        (["--overlap-moe-expert-parallel-comm"], "but its schedule takes apart the layers whose states are read"),
        (
            ["--drafter-steps", "64"],
            "--drafter-steps is 64, but sequences of --seq-length 64 have no token that far ah",
        ),
        (["--hidden-size", "32"], "error: the checkpoint cannot be loaded into this model: Global shape mismatch"),
        (["--drafter-layers", "1", "2", "3"], "--drafter-layers is 1 2 3, and the drafter of .* has 2 4 5; give that"),
    ],
)
def test_an_impossible_drafter_run_is_rejected(trained: Path, tmp_path: Path, flags: list[str], said: str) -> None:
    words = command("--load", f"{trained}/drafter", *DRAFTER, *flags)
    with pytest.raises(AssertionError, match=said):
        launch.run(words, tmp_path / "log")


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    assert convert(["drafter-to-hf", str(trained / "drafter"), str(trained / "exported"), "--json"]) == 0
    return trained / "exported"


def test_an_exported_folder_has_the_keys_of_published_drafters(exported: Path) -> None:
    keys, tensors = json.loads((exported / "config.json").read_text()), load_file(exported / "model.safetensors")
    assert keys["architectures"] == ["LlamaForCausalLMEagle3"]
    assert keys["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    drafted = torch.tensor([int(line) for line in DRAFTED.read_text().split()])
    assert torch.equal(tensors["d2t"] + torch.arange(len(drafted)), drafted)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], drafted)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (32, 128)
    assert f"drafts {len(drafted)} tokens" in inspect(exported)["drafter"]


def assert_same_there_and_back(trunk: Path, exported: Path, checkpoint: Path, folder: Path) -> None:
    """Check that an exported drafter, attached to the trunk, equals its checkpoint, and exports to the same bytes."""
    assert convert(["verify", str(exported), str(checkpoint)]) == 0
    assert convert(["attach-drafter", str(trunk), str(exported), str(folder / "attached")]) == 0
    assert convert(["drafter-to-hf", str(folder / "attached"), str(folder / "again")]) == 0
    for name in ("config.json", "model.safetensors"):
        assert (folder / "again" / name).read_bytes() == (exported / name).read_bytes()
    ours, theirs = tensors_of(folder / "attached"), tensors_of(checkpoint)
    assert ours.keys() == theirs.keys()
    assert [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)] == []
    of_kernels = {key for key in DistReader(checkpoint).objects if key.startswith("drafter.")}
    assert of_kernels <= DistReader(folder / "attached").objects.keys()  # training needs all of them


def test_a_round_trip_is_equal_bit_by_bit(trained: Path, exported: Path, tmp_path: Path) -> None:
    assert_same_there_and_back(trained / "trunk", exported, trained / "drafter", tmp_path)


def test_draft_token_order_is_irrelevant_but_lists_must_agree(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(exported / "model.safetensors")
    tokens_N = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    order_N = torch.randperm(len(tokens_N), generator=torch.Generator().manual_seed(1))
    mixed = {
        "lm_head.weight": tensors["lm_head.weight"][order_N],
        "d2t": tokens_N[order_N] - torch.arange(len(order_N)),
    }
    for name, changes in (("mixed", mixed), ("other", {"d2t": torch.zeros_like(tokens_N)})):
        shutil.copytree(exported, tmp_path / name)
        save_file({**tensors, **changes}, tmp_path / name / "model.safetensors")
    given = [str(trained / "trunk"), str(tmp_path / "mixed"), str(tmp_path / "attached")]
    assert convert(["attach-drafter", *given]) == 0
    ours, theirs = tensors_of(tmp_path / "attached"), tensors_of(trained / "drafter")
    assert [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)] == []
    capsys.readouterr()
    assert convert(["attach-drafter", str(trained / "trunk"), str(tmp_path / "other"), str(tmp_path / "new")]) == 2
    assert "d2t and t2d name different tokens" in capsys.readouterr().err


def test_nothing_is_written_into_a_source(trained: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(trained.rglob("*"))
    drafter, trunk = trained / "drafter", trained / "trunk"
    assert convert(["drafter-to-hf", str(drafter), str(drafter / "new")]) == 2
    assert convert(["drafter-to-hf", str(trunk), str(trained / "new")]) == 2
    assert convert(["attach-drafter", str(trunk), str(exported), str(trunk / "new")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "which it is made from; name a place outside" in line] == [said[0], said[2]]
    assert "has no drafter; train one with megatron-mtp train --drafter eagle3" in said[1]
    assert sorted(trained.rglob("*")) == before


def read_by_transformers(folder: Path, features_SX: Tensor, embedded_SH: Tensor) -> Tensor:
    """Return logits [S, N] of the first step, from transformers' Llama modules and the folder's names."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

    keys, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = LlamaConfig(**{name: value for name, value in keys.items() if name != "eagle_config"})
    config._attn_implementation = "eager"
    layer, rows = LlamaDecoderLayer(config, 0).eval(), len(features_SX)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, torch.nn.Linear(2 * config.hidden_size, old.out_features, bias=False))
    own = {name.removeprefix("midlayer."): value for name, value in tensors.items() if name.startswith("midlayer.")}
    norms = [LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)]
    norms[0].weight.data, norms[1].weight.data = own.pop("hidden_norm.weight"), tensors["norm.weight"]
    layer.load_state_dict(own)
    feature_SH = features_SX @ tensors["fc.weight"].t()
    both = torch.cat([layer.input_layernorm(embedded_SH), norms[0](feature_SH)], dim=-1)[None]
    angles = LlamaRotaryEmbedding(config)(both, torch.arange(rows)[None])
    mask = torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)[None, None]
    attended = layer.self_attn(hidden_states=both, position_embeddings=angles, attention_mask=mask)[0][0]
    state_SH = feature_SH + attended
    state_SH = state_SH + layer.mlp(layer.post_attention_layernorm(state_SH))
    return norms[1](state_SH) @ tensors["lm_head.weight"].t()


@torch.no_grad()
def test_an_independent_reader_of_the_folder_gets_the_same_logits(trained: Path, exported: Path) -> None:
    model, text = load_model(trained / "drafter"), [3, 17, 5, 90, 44, 2, 61, 8]
    kept: dict[int, Tensor] = {}
    for number, layer in enumerate(model.decoder.layers, start=1):
        layer.register_forward_hook(lambda _, __, made, number=number: kept.update({number: made[0]}))
    ours_SV = trained_forward(model, text)[1][0]
    features_SX = torch.cat([kept[number][:, 0] for number in (2, 4, 5)], dim=-1)
    following = torch.tensor([*text[1:], 0])
    embedded_SH = model.embedding.word_embeddings.weight[following]
    theirs_SN = read_by_transformers(exported, features_SX, embedded_SH)
    tokens_N = model.mtp.draft_vocabulary
    torch.testing.assert_close(ours_SV[:-1, tokens_N], theirs_SN[:-1], rtol=1e-4, atol=1e-4)


def spoiled(folder: Path, made: Path, **changes: Any) -> Path:
    made.mkdir()
    keys = json.loads((folder / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(keys | changes))
    (made / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return made


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, "has hidden_size 128, and the trunk 64; give a drafter of this trunk"),
        ({"vocab_size": 100}, "has vocab_size 100, and the trunk 127"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 30]}, "reads the layers 2 4 30, and the trunk has 8 layers"),
        ({"draft_vocab_size": 10}, "and a drafter of this trunk has it as"),
        ({"norm_output": True}, "has norm_output, a form of drafters that is not known here"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "give a DFlashDraftModel, .*LlamaForCausalLMEagle3",
        ),
    ],
)
def test_a_drafter_of_another_trunk_is_refused(
    trained: Path, exported: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    args = DistReader(trained / "trunk").common()["args"]
    with pytest.raises(ValueError, match=said):
        read_drafter(spoiled(exported, tmp_path / "spoiled", **changes), args)


def test_an_alternative_key_for_the_layers_is_read(trained: Path, exported: Path, tmp_path: Path) -> None:
    args = DistReader(trained / "trunk").common()["args"]
    made = spoiled(exported, tmp_path / "other", eagle_aux_hidden_state_layer_ids=None)
    assert read_drafter(made, args).kind.layers == (2, 4, 5)


BLOCKS = {
    "dflash": ["--drafter-num-layers", "2", "--drafter-mask-token", "3"],
    "dspark": f"--drafter-num-layers 2 --drafter-markov-rank 8 --mtp-draft-vocab-file {DRAFTED}".split(),
}


@pytest.fixture(scope="module", params=tiered(BLOCKS, ("dspark",)))
def block(trained: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Create a folder with `drafter`, trained four steps on the same trunk, and `exported`."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    flags = ["--load", f"{trained}/trunk", "--save", f"{folder}/drafter", "--drafter", kind, *BLOCKS[kind]]
    launch.run(command(*flags, "--drafter-steps", "3", "--drafter-blocks", "8"), folder / "log")
    assert convert(["drafter-to-hf", str(folder / "drafter"), str(folder / "exported"), "--json"]) == 0
    return folder


def test_a_block_drafter_round_trip_is_bit_identical_and_drafts(trained: Path, block: Path, tmp_path: Path) -> None:
    exported = block / "exported"
    keys, tensors = json.loads((exported / "config.json").read_text()), load_file(exported / "model.safetensors")
    kind = block.name.rstrip("0123456789")
    wanted: dict[str, Any] = {
        "dflash": {"architectures": ["DFlashDraftModel"], "block_size": 4},
        "dspark": {"architectures": ["Qwen3DSparkModel"], "block_size": 3, "markov_rank": 8, "mask_token_id": 126},
    }[kind]
    assert {name: keys[name] for name in wanted} == wanted
    assert keys["dflash_config"]["target_layer_ids"] == [1, 5]
    assert ("lm_head.weight" in tensors) == ("d2t" in tensors) == (kind == "dspark")
    assert "3 at once behind mask token" in inspect(exported)["drafter"]
    assert_same_there_and_back(trained / "trunk", exported, block / "drafter", tmp_path)
    prompts, runner = [[5, 6, 7], [1, 2, 3, 4]], load_runner(tmp_path / "attached")
    drafted = generate(runner, prompts, 20, speculative={"method": kind})
    assert drafted.token_ids == generate(runner, prompts, 20).token_ids
    assert drafted.stats.drafted > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"dflash_config": {"target_layer_ids": [1, 8], "mask_token_id": 3}},
            "reads the layers 2 9, and the trunk",
        ),
        (
            {"dflash_config": {"target_layer_ids": [1, 5], "mask_token_id": 127}},
            "has mask_token_id 127, and the",
        ),
        ({"block_size": 1000}, "has block_size 1000, of .* drafts, and the trunk has 64 positions"),
        ({"conv_kernel_size": 2}, "has conv_kernel_size, a form"),
        ({"num_hidden_layers": 3}, "'layers.2.input_layernorm.weight' is absent"),
    ],
)
def test_a_block_drafter_of_another_trunk_is_refused(
    trained: Path, block: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    args = DistReader(trained / "trunk").common()["args"]
    with pytest.raises(ValueError, match=said):
        read_drafter(spoiled(block / "exported", tmp_path / "spoiled", **changes), args)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", DRAFTERS)
def test_attach_trains_exports_and_drafts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the whole verb from a folder and texts; a second call repeats no finished step."""
    train_bpe(["abc abd"], 258, tmp_path / "tokenizer")
    model = make(tmp_path / "model", "llama", 0, changes={"num_hidden_layers": 5, "vocab_size": 258})
    shutil.copytree(tmp_path / "tokenizer", model, dirs_exist_ok=True)
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"abc abd {number} " * 20)

    started: list[str] = []

    def run(command: list[str]) -> SimpleNamespace:
        started.append(command[3])
        command += ["--max-new-tokens", "16"] if started[-1] == "generate" else []
        return SimpleNamespace(returncode=launch.start(command, tmp_path / started[-1]).wait(launch.TIMEOUT))

    monkeypatch.setattr(attach, "subprocess", SimpleNamespace(run=run))
    flags = f"--drafter {kind} --drafter-steps 3 --steps 4 --sequence 32 --batch 2 --float32"
    flags += "" if DRAFTERS[kind].reads == 0 else " --drafter-layers 1 2 3"
    flags += " --evaluated-batches 1" + (" --mtp-draft-vocab-size 200" if kind == "eagle3" else "")
    words = [str(model), str(tmp_path / "texts"), str(tmp_path / "run"), *flags.split()]
    assert attach.main(words, "attach") == 0, (tmp_path / started[-1]).read_text()
    fitted = ["convert"] if kind == "eagle3" else []
    assert started == ["preprocess", "convert", *fitted, "train", "convert", "generate"]
    read = "the trunk's last state" if DRAFTERS[kind].reads == 0 else "the trunk after 1 2 3 layers"
    assert f"reads {read}" in inspect(tmp_path / "run/exported")["drafter"]
    assert convert(["verify", f"{tmp_path}/run/exported", f"{tmp_path}/run/checkpoint"]) == 0
    (said,) = [line for line in (tmp_path / "generate").read_text().splitlines() if "same tokens" in line]
    assert "yes" in said
    started.clear()
    assert attach.main(words, "attach") == 0, (tmp_path / started[-1]).read_text()
    assert started == "preprocess train generate".split()


def test_an_eagle3_drafter_drafts_without_changing_the_output(trained: Path) -> None:
    prompts, runner = [[5, 6, 7], [1, 2, 3, 4]], load_runner(trained / "drafter")
    plain = generate(runner, prompts, 20).token_ids
    for method in ("eagle3", "eagle3_tree"):
        drafted = generate(runner, prompts, 20, speculative={"method": method, "num_speculative_tokens": 2})
        assert drafted.token_ids == plain
        assert drafted.stats.drafted > 0


@pytest.mark.matrix
def test_a_latent_attention_drafter_trains_exports_and_resumes(trained: Path, tmp_path: Path) -> None:
    sizes, saved = "16 24 8 4 12", tmp_path / "drafter"
    flags = ["--load", f"{trained}/trunk", "--save", str(saved), *DRAFTER, "--drafter-multi-latent-attention"]
    launch.run(command(*flags, *sizes.split()), tmp_path / "log")
    assert convert(["drafter-to-hf", str(saved), str(tmp_path / "exported")]) == 0
    assert_same_there_and_back(trained / "trunk", tmp_path / "exported", saved, tmp_path)
    prompts, runner = [[5, 6, 7], [1, 2, 3, 4]], load_runner(tmp_path / "attached")
    drafted = generate(runner, prompts, 20, speculative={"method": "eagle3_tree", "num_speculative_tokens": 2})
    assert drafted.token_ids == generate(runner, prompts, 20).token_ids
    assert drafted.stats.drafted > 0
    more = ["--use-checkpoint-args", "--load", f"{tmp_path}/attached", "--finetune", "--save", f"{tmp_path}/more"]
    launch.run(command(*more, *DRAFTER), tmp_path / "more.log")
    assert DistReader(tmp_path / "more").common()["args"].drafter_multi_latent_attention == [16, 24, 8, 4, 12]


# --- next to MTP layers -----------------------------------------------------------------------------------------------

MTP = f"--mtp-num-layers 2 --mtp-init random --mtp-train-only --clip-grad 0 --mtp-draft-vocab-file {DRAFTED}".split()


@pytest.fixture(scope="module")
def beside(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with `both`, also saved after two of four steps, and what each learned alone."""
    folder = tmp_path_factory.mktemp("beside")
    alone = [*DRAFTER, "--clip-grad", "0"]
    for name, flags in (("mtp", MTP), ("drafter", alone), ("both", ["--use-checkpoint-args", *MTP, *DRAFTER])):
        measures = ["--mtp-acceptance-interval", "1", "--eval-interval", str(STEPS), "--eval-iters", "1"]
        given = ["--load", f"{trained}/trunk", "--save", f"{folder}/{name}", *flags, *measures]
        log = launch.run(command(*given), folder / f"{name}.log")
    assert "drafter_3 loss" in log
    assert "mtp_2 loss" in log
    assert "the drafter:" in log
    return folder


def test_mtp_layers_and_a_drafter_train_as_each_does_alone(trained: Path, beside: Path) -> None:
    both, mtp, drafter = (tensors_of(beside / name) for name in ("both", "mtp", "drafter"))
    assert both.keys() == mtp.keys() | drafter.keys()
    trunk = tensors_of(trained / "trunk")
    assert [key for key, tensor in trunk.items() if not torch.equal(both[key], tensor)] == []
    alone = mtp | {key: tensor for key, tensor in drafter.items() if key.startswith("drafter.")}
    far = {key: (both[key].double() - tensor.double()).abs().max().item() for key, tensor in alone.items()}
    assert {key: value for key, value in far.items() if value > 1e-6} == {}
    records = [json.loads((beside / name / "mtp_acceptance.json").read_text()) for name in ("both", "mtp", "drafter")]
    assert records[0].pop("drafter") == records[2]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    "layout", tiered(["", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"], ("",))
)
def test_mtp_layers_and_a_drafter_resume_in_any_layout(beside: Path, tmp_path: Path, layout: str) -> None:
    flags = ["--load", f"{beside}/both", "--ckpt-step", str(HALF), "--save", f"{tmp_path}/resumed"]
    words = command(*flags, *layout.split(), *MTP, *DRAFTER, processes=2 if layout else 1)
    launch.run(words, tmp_path / "log")
    ours, theirs = (tensors_of(folder) for folder in (tmp_path / "resumed", beside / "both"))
    assert ours.keys() == theirs.keys()
    far = {key: (ours[key].double() - theirs[key].double()).abs().max().item() for key in theirs}
    assert {key: value for key, value in far.items() if value > (1e-4 if layout else 0)} == {}


def test_mtp_layers_or_a_drafter_of_one_checkpoint_draft_and_export(beside: Path, tmp_path: Path) -> None:
    prompts = [[5, 6, 7], [1, 2, 3, 4]]
    plain = generate(load_runner(beside / "both"), prompts, 12).token_ids
    for method, kind, single in (("mtp", "sequential", "mtp"), ("eagle3", "eagle3", "drafter")):
        config = config_from({"method": method, "num_speculative_tokens": 2})
        ours, theirs = load_runner(beside / "both", config=config), load_runner(beside / single)
        assert ours.kind == kind
        assert ours.alarm.expected is not None
        assert ours.alarm.expected == theirs.alarm.expected
        drafted, expected = (generate(one, prompts, 12, speculative=config) for one in (ours, theirs))
        assert drafted.token_ids == expected.token_ids == plain
        assert drafted.stats.accepted_at == expected.stats.accepted_at
    for name in ("both", "drafter"):
        assert convert(["drafter-to-hf", str(beside / name), str(tmp_path / name)]) == 0
    for name in ("both", "mtp"):
        assert convert(["mcore-to-hf", str(beside / name), str(tmp_path / f"{name}-hf")]) == 0
    for one, other in (("both", "drafter"), ("both-hf", "mtp-hf")):
        ours, theirs = (
            load_file(tmp_path / one / "model.safetensors"),
            load_file(tmp_path / other / "model.safetensors"),
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)


NEW_LAYERS = MTP[: MTP.index("--mtp-draft-vocab-file")]


@pytest.mark.matrix
def test_new_mtp_layers_take_the_draft_vocabulary_of_the_drafter(trained: Path, tmp_path: Path) -> None:
    flags = ["--load", f"{trained}/drafter", "--save", f"{tmp_path}/both", *NEW_LAYERS, *DRAFTER[:4], *STILL]
    launch.run(command(*flags), tmp_path / "log")
    ours, theirs = tensors_of(tmp_path / "both"), tensors_of(trained / "drafter")
    assert same_bits(ours, theirs, theirs)
    assert torch.equal(ours["mtp.draft_vocabulary"], theirs["drafter.draft_vocabulary"])


@pytest.mark.matrix
def test_mtp_layers_and_a_drafter_both_get_a_new_draft_vocabulary(trained: Path, tmp_path: Path) -> None:
    flags = [*NEW_LAYERS, *DRAFTER[:4], *STILL]
    launch.run(command("--load", f"{trained}/trunk", "--save", f"{tmp_path}/whole", *flags), tmp_path / "first.log")
    given = ["--load", f"{tmp_path}/whole", "--save", f"{tmp_path}/both", *flags, *MTP[-2:]]
    launch.run(command(*given), tmp_path / "second.log")
    ours, theirs = tensors_of(tmp_path / "both"), tensors_of(tmp_path / "whole")
    lists = {f"{of}.draft_vocabulary" for of in ("mtp", "drafter")}
    assert ours.keys() - theirs.keys() == {"drafter.head", *lists}
    assert same_bits(ours, theirs, theirs)
    assert torch.equal(ours["drafter.head"], theirs["output_layer.weight"][ours["mtp.draft_vocabulary"]])


@pytest.mark.parametrize(
    "finetunes", [[], pytest.param(["--finetune"], marks=pytest.mark.matrix)], ids=["", "finetune"]
)
@pytest.mark.parametrize(
    ("flags", "left_out"),
    tiered([(MTP, "a drafter"), (DRAFTER, "MTP layers"), ([], "MTP layers and a drafter")], [(MTP, "a drafter")]),
    ids=["MTP layers", "drafter", "trunk"],
)
def test_a_run_resumes_without_some_heads_and_prints_which_it_drops(
    beside: Path, tmp_path: Path, flags: list[str], left_out: str, finetunes: list[str]
) -> None:
    given = ["--load", f"{beside}/both", "--save", f"{tmp_path}/one", *flags, *finetunes, *STILL]
    log = launch.run(command(*given), tmp_path / "log")
    assert f"has {left_out}, which this run leaves out; starting as with --finetune" in log
    ours, theirs = tensors_of(tmp_path / "one"), tensors_of(beside / "both")
    beginnings = {"a drafter": ("drafter.",), "MTP layers": ("mtp.",)}.get(left_out, ("drafter.", "mtp."))
    assert ours.keys() == {key for key in theirs if not key.startswith(beginnings)}
    assert same_bits(ours, theirs, ours)


def test_two_lists_of_drafted_tokens_are_refused(beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.txt").write_text("1\n2\n100\n")
    words = command("--load", f"{beside}/both", *MTP, *DRAFTER, "--mtp-draft-vocab-file", f"{tmp_path}/other.txt")
    with pytest.raises(AssertionError, match=r"other.txt, .* were trained to draft 58 other"):
        launch.run(words, tmp_path / "log")
    monkeypatch.setattr(loading, "stored_draft_vocabulary", lambda _, of_drafter: torch.tensor([1, 2 + of_drafter]))
    folder, args = DistReader(beside / "both").folder, DistReader(beside / "both").common()["args"]
    with pytest.raises(ValueError, match="its MTP layers draft other tokens"):
        loading._stored_draft_vocabulary(folder, args)
