"""Trained models in Hugging Face format: vocabulary, special tokens, and the config keys that engines read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make, read
from megatron.core import dist_checkpointing
from trained_folders import save, trained

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore, keep_hf_files
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify.verify import verify
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.megatron.checkpoint import HF_FILES
from megatron_mtp.megatron.parsing import parse_flags
from megatron_mtp.model.arguments import config_of
from megatron_mtp.model.build import build
from megatron_mtp.model.stored_arguments import completed
from megatron_mtp.training.arguments import checkpoint_arguments


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(["some words to make a vocabulary of"] * 3, 260, tmp_path_factory.mktemp("tokenizer") / "bpe")


pytestmark = pytest.mark.usefixtures("forked_python")

QUIET = Options(quiet=True, workers=1)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 --moe-router-score-function sigmoid"
LATENT = "--multi-latent-attention --qk-layernorm --q-lora-rank 8 --kv-lora-rank 8 --rope-type rope"
ALL_KEYS = (
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps rope_parameters rope_theta "
    "tie_word_embeddings attention_bias dtype torch_dtype num_nextn_predict_layers"
)
ROUTER_KEYS = (
    "n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group "
    "topk_group norm_topk_prob routed_scaling_factor scoring_func topk_method"
)
FORMS = {
    "dense": ("", None, f"{ROUTER_KEYS} use_qk_norm partial_rotary_factor"),
    "experts": (EXPERTS, None, f"{ROUTER_KEYS} use_qk_norm partial_rotary_factor"),
    "latent": (
        f"{EXPERTS} {LATENT}",
        None,
        f"{ROUTER_KEYS} moe_layer_freq q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    ),
    "mimo": ("--add-qkv-bias", "mimo", "auto_map"),
}
"""Flags, family, and the keys that the loaders of transformers 5.23, vLLM 0.32 and SGLang 0.5.23 read for it."""


def export(source: Path, target: Path, **choice: Any) -> dict[str, Any]:
    mcore_to_hf(source, target, QUIET, form_of(source, **choice))
    keys: dict[str, Any] = json.loads((target / "config.json").read_text())
    return keys


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", FORMS)
def test_every_key_that_an_engine_reads_is_written(name: str, tmp_path: Path) -> None:
    flags, family, own = FORMS[name]
    keys = export(trained(tmp_path / "mcore", flags), tmp_path / "hf", family=family)
    assert {*ALL_KEYS.split(), *own.split()} <= keys.keys()
    assert [key for key, value in keys.items() if value is None] == []


@pytest.mark.usefixtures("megatron")
def test_an_epsilon_that_transformers_lacks_inside_latent_attention_is_refused(tmp_path: Path) -> None:
    """With 1e-4, logits of an export are off by a thousandth of the largest."""
    with pytest.raises(ValueError, match=r"epsilon of 0\.0001, .* latent .* transformers has 1e-6"):
        export(trained(tmp_path / "latent", f"{LATENT} --norm-epsilon 1e-4"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    assert export(trained(tmp_path / "dense", "--norm-epsilon 1e-4"), tmp_path / "other")["rms_norm_eps"] == 1e-4


@pytest.mark.usefixtures("megatron")
def test_vocabulary_padding_is_not_exported(tmp_path: Path) -> None:
    source = trained(tmp_path / "mcore")
    keys = export(source, tmp_path / "hf")
    tensors, model = read(tmp_path / "hf"), load_model(source).cpu()
    assert keys["vocab_size"] == 100
    assert torch.equal(tensors["model.embed_tokens.weight"], model.embedding.word_embeddings.weight[:100])
    assert torch.equal(tensors["lm_head.weight"], model.output_layer.weight[:100])
    assert model.output_layer.weight.size(0) == 128
    hf_to_mcore(tmp_path / "hf", tmp_path / "again", QUIET)
    assert export(tmp_path / "again", tmp_path / "back") == keys
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
    assert [check for check in verify(tmp_path / "hf", source) if not check.ok] == []


@pytest.mark.usefixtures("megatron")
def test_keys_that_a_config_leaves_out_have_their_familys_defaults(tmp_path: Path) -> None:
    """transformers writes no `norm_topk_prob` for this family, whose expert weights always sum to 1."""
    source = make(tmp_path / "hf", "qwen3_5_moe_text-packed", 1)
    assert "norm_topk_prob" not in json.loads((source / "config.json").read_text())
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form_of(tmp_path / "mcore"))
    before, after = read(source), read(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("megatron")
def test_a_vocabulary_padded_by_megatron_is_exported_unpadded(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "mimo", 1)
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    model = load_model(tmp_path / "mcore")
    assert model.embedding.word_embeddings.weight.size(0) == 128
    assert read(source)["model.embed_tokens.weight"].size(0) == 96
    saved = save(
        model,
        dist_checkpointing.load_common_state_dict(str(tmp_path / "mcore" / "release"))["args"],
        tmp_path / "saved",
    )
    keep_hf_files(tmp_path / "mcore" / HF_FILES, saved / HF_FILES, {})
    export(saved, tmp_path / "back")
    there, back = read(source), read(tmp_path / "back")
    assert there.keys() == back.keys()
    assert [name for name in there if not torch.equal(there[name], back[name])] == []


@pytest.mark.usefixtures("megatron")
def test_the_tokenizer_tells_vocabulary_and_special_tokens(tmp_path: Path, tokenizer: Path) -> None:
    keys = export(trained(tmp_path / "mcore", vocabulary=None, tokenizer=tokenizer), tmp_path / "hf")
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    assert keys["vocab_size"] == 260
    assert keys.items() >= ids.items()
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == ids
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


@pytest.mark.usefixtures("megatron")
def test_rows_that_no_token_has_are_kept_when_a_converted_model_is_trained(tmp_path: Path, tokenizer: Path) -> None:
    """As in Qwen3 and DeepSeek-V3, whose embeddings have more rows than their tokenizers have tokens."""
    converted = trained(tmp_path / "converted", vocabulary=300)
    args = parse_flags(["--use-checkpoint-args", "--load", str(converted)])
    vars(args).update({**checkpoint_arguments(args), "tokenizer_model": str(tokenizer)})
    model = build(config_of(completed(args)))
    keys = export(save(model, args, tmp_path / "mcore"), tmp_path / "hf")
    assert keys["vocab_size"] == 300
    assert torch.equal(read(tmp_path / "hf")["lm_head.weight"], model.output_layer.weight[:300].cpu())


@pytest.mark.usefixtures("megatron")
def test_a_vocabulary_smaller_than_that_of_the_converted_model_is_refused(tmp_path: Path) -> None:
    converted = trained(tmp_path / "converted", vocabulary=300)
    words = ["--use-checkpoint-args", "--load", str(converted), "--vocab-size"]
    assert checkpoint_arguments(parse_flags([*words, "300"]))["vocab_size"] == 300
    with pytest.raises(ValueError, match="--vocab-size is 299, but the model of --load has 300 tokens"):
        checkpoint_arguments(parse_flags([*words, "299"]))


@pytest.mark.usefixtures("megatron")
def test_without_a_tokenizer_no_vocabulary_data_is_invented(tmp_path: Path) -> None:
    keys = export(trained(tmp_path / "mcore", vocabulary=None), tmp_path / "hf")
    assert keys["vocab_size"] == 384  # all rows: 300 padded to a multiple of 128
    assert not [key for key in keys if key.endswith("_token_id")]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.usefixtures("megatron")
def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    source = trained(tmp_path / "mcore")
    with pytest.raises(ValueError, match=r"has 260 tokens, but .* has 128 rows"):
        export(source, tmp_path / "hf", tokenizer=tokenizer)
    assert not (tmp_path / "hf").exists()


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    "flags",
    [
        "--rotary-base 1000000",
        pytest.param("--norm-epsilon 1e-3", marks=pytest.mark.matrix),
        pytest.param("--rotary-percent 0.5", marks=pytest.mark.matrix),
    ],
)
def test_a_kept_config_does_not_override_the_checkpoints_arguments(flags: str, tmp_path: Path) -> None:
    """For example if a converted model was trained with other flags and saved over itself."""
    source = trained(tmp_path / "mcore", flags)
    keep_hf_files(export_folder(trained(tmp_path / "before"), tmp_path / "described"), source / HF_FILES, {})
    with pytest.raises(ValueError, match=r"was trained with .*, but it is .* in .*hf/config.json; make"):
        form_of(source)
    with pytest.raises(ValueError, match=r"in the config.json of .*; give a folder of the same model"):
        form_of(source, like=tmp_path / "described")
    keys = form_of(source, family="glm4_moe").keys
    assert keys["rope_theta"] == (1e6 if "base" in flags else 1e4)
    assert keys["rms_norm_eps"] == (1e-3 if "epsilon" in flags else 1e-5)
    assert keys["partial_rotary_factor"] == (0.5 if "percent" in flags else 1.0)


def export_folder(source: Path, target: Path) -> Path:
    export(source, target)
    return target
