"""gpt-to-hybrid and hybrid-to-gpt: bit-identical round trips, and planted faults that `verify` finds."""

import errno
import json
from argparse import Namespace
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make, read
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron_single import randomize
from tiers import tiered

from megatron_mtp.checkpoint.convert import hybrid, stream
from megatron_mtp.checkpoint.convert.hybrid import Halves, gpt_arguments, hybrid_arguments, plan_migration
from megatron_mtp.checkpoint.convert.stream import CheckpointFiles, Group, Options
from megatron_mtp.checkpoint.model import model_of
from megatron_mtp.checkpoint.verify.forms import verify_forms
from megatron_mtp.checkpoint.verify.verify import Check
from megatron_mtp.cli import convert
from megatron_mtp.megatron.checkpoint import HF_FILES, KEPT_TOKENIZER, TRACKER
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.parsing import parsed

pytestmark = pytest.mark.usefixtures("megatron")

QUIET = Options(quiet=True, workers=1)
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 48 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --max-position-embeddings 64 --seq-length 64"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-token-dispatcher-type allgather"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --qk-layernorm"
)
DEPTHS = "--mtp-num-layers"
CASES = {
    "dense": (f"{DEPTHS} 1 --untie-embeddings-and-output-weights", "*-*-/*-"),
    "without depths": ("", "*-*-"),
    "tied, two depths": (f"{DEPTHS} 2", "*-*-/*-/*-"),
    "repeated": (f"{DEPTHS} 2 --mtp-use-repeated-layer", "*-*-/*-/*-"),
    "biases, LayerNorm, normalized heads": (f"{DEPTHS} 1 --add-qkv-bias --qk-layernorm", "*-*-/*-"),
    "experts": (f"{DEPTHS} 2 {EXPERTS} --untie-embeddings-and-output-weights", "*E*E/*E/*E"),
    "experts behind an MLP": (f"{DEPTHS} 1 {EXPERTS} --moe-layer-freq [0,1]", "*-*E/*E"),
    "an MLP behind experts": (f"{DEPTHS} 1 {EXPERTS} --moe-layer-freq 2", "*E*-/*-"),
    "latent": (f"{DEPTHS} 2 {LATENT}", "+-+-/+-/+-"),
    "latent with experts": (f"{DEPTHS} 1 {LATENT} {EXPERTS} --moe-layer-freq [0,1]", "+-+E/+E"),
}
MOMENTS = ("exp_avg", "exp_avg_sq", "fp32_param")


def trained(folder: Path, flags: str = "", depths: int | None = None) -> Path:
    """Return what a run with a plain optimizer saves at step 7; layers of one kind of GPT are stacked."""
    args = parsed(f"{TINY} {flags}".split(), 100)
    args.mtp_architecture = "sequential"
    model = model_of(args)
    randomize(model)
    entries: dict[str, Any] = {"model": model.sharded_state_dict(), "optimizer": {"common_step": torch.tensor(7.0)}}
    for seed, name in enumerate(MOMENTS, start=2):
        state = model_of(args)
        randomize(state, seed)
        entries["optimizer"][name] = state.sharded_state_dict()
        for key in [key for key in entries["optimizer"][name] if key.endswith("_extra_state")]:
            del entries["optimizer"][name][key]
        add_prefix_for_sharding(entries["optimizer"][name], f"optimizer.state.{name}.")
    inside = folder / "iter_0000007"
    inside.mkdir(parents=True)
    rest = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "opt_param_scheduler": {"max_lr": 1e-3}}
    dist_checkpointing.save(entries | rest, str(inside))
    (folder / TRACKER).write_text("7")
    for name in (HF_FILES, KEPT_TOKENIZER):
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text("{}")
    return folder


def test_the_stored_pieces_of_every_layer_cover_it_once(tmp_path: Path) -> None:
    """A piece of stacked layers belongs to one layer."""
    reader = DistReader(trained(tmp_path / "gpt"))
    pieces = {key: reader.slabs(key) for key in (*reader.keys, *reader.state_keys)}
    twice = [key for key, found in pieces.items() if sum(prod(shape) for _, shape in found) != prod(reader.shape(key))]
    assert twice == []
    assert any(key.startswith("decoder.layers.1.") for key in pieces)


def bits(folder: Path) -> dict[str, torch.Tensor]:
    reader = DistReader(folder)
    return {key: reader.read(key) for key in (*reader.keys, *reader.state_keys)}


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.ok]


@pytest.mark.parametrize("case", tiered(CASES, ("experts behind an MLP",)))
def test_a_migration_round_trip_is_bit_identical(case: str, tmp_path: Path) -> None:
    flags, pattern = CASES[case]
    source = trained(tmp_path / "gpt", flags)
    done = plan_migration(source, True).write(tmp_path / "hybrid", QUIET)
    assert done["family"] == f"hybrid of layers {pattern}"
    assert failed(verify_forms(source, tmp_path / "hybrid")) == []
    plan_migration(tmp_path / "hybrid", False).write(tmp_path / "back", QUIET)
    assert failed(verify_forms(tmp_path / "hybrid", tmp_path / "back")) == []
    there, back = bits(source), bits(tmp_path / "back")
    assert len([key for key in there if key.startswith("optimizer.state.")]) == 3 * len(DistReader(source).keys)
    assert there.keys() <= back.keys()  # norms with two names are written under both
    assert [key for key in there if not torch.equal(there[key], back[key])] == []
    arguments = [vars(DistReader(folder).common()["args"]) for folder in (source, tmp_path / "back")]
    assert {name for name in arguments[0] if arguments[0][name] != arguments[1].get(name)} <= {"moe_layer_freq"}
    assert DistReader(tmp_path / "back").state()["optimizer"]["common_step"] == 7
    for name in ("hybrid", "back"):
        assert (tmp_path / name / TRACKER).read_text() == "7"
        assert (tmp_path / name / "iter_0000007").is_dir()
        assert not [key for key in DistReader(tmp_path / name).objects if key.startswith("optimizer.")]
        assert (tmp_path / name / HF_FILES / "tokenizer.json").is_file()
        assert (tmp_path / name / KEPT_TOKENIZER / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("gpt", "hybrid"),
    [
        ("decoder.layers.3.self_attention.linear_qkv.weight", "decoder.layers.6.self_attention.linear_qkv.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "decoder.layers.7.pre_mlp_layernorm.weight"),
        ("decoder.layers.3.mlp.experts.experts.linear_fc2._extra_state/shard_2_4",
         "decoder.layers.7.mlp.experts.experts.linear_fc2._extra_state/shard_2_4"),
        ("mtp.layers.1.transformer_layer.input_layernorm.weight",
         "mtp.layers.1.mtp_model_layer.layers.0.input_layernorm.weight"),
        ("mtp.layers.0.transformer_layer.mlp.router.weight", "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight"),
        ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.weight"),
        ("mtp.layers.0.final_layernorm.weight", "mtp.layers.0.final_layernorm.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
        ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "optimizer.state.exp_avg.decoder.final_norm.weight"),
        ("chained_1.optimizer.state.exp_avg.decoder.layers.2.mlp.router.weight",
         "chained_1.optimizer.state.exp_avg.decoder.layers.5.mlp.router.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("rng_state/shard_0.0_1.1", "rng_state/shard_0.0_1.1"),
    ],
)  # fmt: skip
def test_every_key_has_its_counterpart(gpt: str, hybrid: str) -> None:
    halves = Halves.of("*-*-|*E*E/*E/*E")
    assert halves.hybrid_key(gpt) == hybrid
    assert gpt in halves.gpt_keys(hybrid)


def test_the_norm_before_experts_is_written_under_both_key_names() -> None:
    layer = "optimizer.state.exp_avg.decoder.layers.1."
    assert Halves.of("*-*E").gpt_keys("optimizer.state.exp_avg.decoder.layers.3.pre_mlp_layernorm.weight") == [
        f"{layer}mlp.linear_fc1.layer_norm_weight",
        f"{layer}pre_mlp_layernorm.weight",
    ]


def test_tensors_without_a_place_are_refused() -> None:
    halves = Halves.of("*-*-")
    with pytest.raises(ValueError, match=r"'decoder\.layers\.2\.mlp\.router\.weight' is behind the last"):
        halves.hybrid_key("decoder.layers.2.mlp.router.weight")
    with pytest.raises(ValueError, match="has no place in a hybrid model"):
        halves.hybrid_key("decoder.layers.1.cross_attention.linear_q.weight")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("M-*-", r"no GPT has M \(Mamba-2\)"),
        ("*-G-/*-", r"no GPT has G \(Gated DeltaNet\)"),
        ("D-", r"no GPT has D \(sparse attention\)"),
        ("*-*-/M-", r"whose MTP layers are M-, but a GPT's MTP layers are like the last layer of its trunk, \*- here"),
        ("*E*-/*E", "whose MTP layers are [*]E"),
        ("*-*-/*-*-", "whose MTP layers are [*]-[*]-"),
        ("*--*", r"whose symbol 3 is - \(MLP\), but a GPT's layers are attention"),
        ("-*", r"whose symbol 1 is - \(MLP\)"),
        ("*-*", "whose last [*] is half of a GPT's layer"),
        ("*-/*-/*E", "whose MTP layers are [*]E"),
        ("Z-", r"no GPT has Z \(no layer of Megatron\)"),
        ("", "have a pattern without layers; the checkpoint is damaged"),
        ("/*-", "have a pattern without layers; the checkpoint is damaged"),
        (None, "is already a GPT"),
    ],
)
def test_a_pattern_that_is_not_a_gpt_is_rejected_by_its_symbol(pattern: str | None, says: str) -> None:
    args = Namespace(hybrid_layer_pattern=pattern, multi_latent_attention=False, num_layers=4, num_experts=4)
    with pytest.raises(ValueError, match=says):
        gpt_arguments(args, "checkpoint")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": None}, "have num_layers None; the checkpoint is damaged"),
        ({"num_layers": "two"}, "have num_layers 'two'"),
        ({"num_layers": 0}, "have num_layers 0"),
        ({"mtp_num_layers": -1}, "have mtp_num_layers -1"),
        ({"num_experts": 4, "moe_layer_freq": 0}, "have moe_layer_freq 0"),
        ({"num_experts": 4, "moe_layer_freq": [1]}, r"have moe_layer_freq \[1\]"),
        ({"num_experts": 4, "moe_layer_freq": None}, "have moe_layer_freq None"),
    ],
)
def test_arguments_without_layers_are_refused(changes: dict[str, Any], says: str) -> None:
    args = parsed(TINY.split(), 100)
    assert hybrid_arguments(args, "checkpoint").hybrid_layer_pattern
    with pytest.raises(ValueError, match=says):
        hybrid_arguments(Namespace(**{**vars(args), **changes}), "checkpoint")


def test_a_gpt_without_a_hybrid_equivalent_is_rejected_by_its_flag() -> None:
    args = parsed(f"{TINY} --no-rope-freq 2".split(), 100)
    with pytest.raises(ValueError, match="trained with --no-rope-freq, which a hybrid"):
        hybrid_arguments(args, "checkpoint")
    args = parsed([*TINY.replace("type rope", "type mrope").split(), "--mrope-section", "2", "2", "4"], 100)
    with pytest.raises(ValueError, match="position-embedding-type mrope"):
        hybrid_arguments(args, "checkpoint")


# --- planted faults ---------------------------------------------------------------------------------------------------


def with_keys(change: Callable[[dict[str, list[str]]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Let the conversion write tensors under the wrong keys that `change` makes."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = hybrid._parts

        def planted(reader: DistReader, keys: dict[str, list[str]]) -> list[list[Group]]:
            change(keys)
            return original(reader, keys)

        patch.setattr(hybrid, "_parts", planted)
        patch.setattr(Halves, "check", lambda *_: None)

    return plant


def swap(prefix: str) -> Callable[[dict[str, list[str]]], None]:
    """Swap the projections of the trunk's first two layers."""

    def change(keys: dict[str, list[str]]) -> None:
        first, second = (f"{prefix}decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 1))
        keys[first], keys[second] = keys[second], keys[first]

    return change


def with_setting(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def planted(args: Namespace, source: str) -> Namespace:
            return Namespace(**{**vars(hybrid_arguments(args, source)), name: value})

        patch.setattr(hybrid, "hybrid_arguments", planted)

    return plant


def without_step(patch: pytest.MonkeyPatch) -> None:
    schedule = {"opt_param_scheduler": {"max_lr": 0.1}}

    def files(path: Path, common: dict[str, Any], *more: Any) -> CheckpointFiles:
        return CheckpointFiles(path, common | schedule, *more)

    patch.setattr(hybrid, "CheckpointFiles", files)


TENSORS, STATE = "tensors that are equal bit by bit", "tensors of the optimizer's state that are equal bit by bit"
LOST = "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight"
FAULTS = {
    "layers swapped": (with_keys(swap("")), {TENSORS, "trunk logits, largest difference"}),
    "states swapped": (with_keys(swap("optimizer.state.exp_avg.")), {STATE}),
    "a depth's tensor missing": (with_keys(lambda keys: keys.pop(LOST)), {TENSORS, "logits not compared"}),
    "a depth's state missing": (with_keys(lambda keys: keys.pop(f"optimizer.state.exp_avg.{LOST}")), {STATE}),
    "another number": (with_setting("layernorm_epsilon", 0.1),
                       {"settings that differ", "trunk logits, largest difference"}),
    "another router": (with_setting("rotary_base", 50),
                       {"settings that differ", "trunk logits, largest difference"}),
    "another schedule": (without_step, {"step, optimizer's settings and learning rate that differ"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", tiered(FAULTS, ("layers swapped", "another router")))
def test_verify_sees_a_planted_fault(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, seen = FAULTS[fault]
    source = trained(tmp_path / "gpt", f"{DEPTHS} 1")
    with monkeypatch.context() as patch:
        plant(patch)
        plan_migration(source, True).write(tmp_path / "hybrid", QUIET)
    wrong = set(failed(verify_forms(source, tmp_path / "hybrid")))
    assert seen <= wrong
    if fault.startswith(("a depth's state", "another schedule", "states")):
        assert wrong == seen


def test_megatrons_logits_reveal_a_fault_in_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion and the bit comparison share the rules; logits and gradients do not."""
    original = Halves.hybrid_key

    def swapped(self: Halves, key: str) -> str:
        found = original(self, key)
        first, second = (f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (1, 3))
        return {first: second, second: first}.get(found, found)

    monkeypatch.setattr(Halves, "hybrid_key", swapped)
    source = trained(tmp_path / "gpt", f"{DEPTHS} 1")
    plan_migration(source, True).write(tmp_path / "hybrid", QUIET)
    wrong = failed(verify_forms(source, tmp_path / "hybrid"))
    assert "trunk logits, largest difference" in wrong
    assert "gradients, largest relative difference" in wrong
    assert TENSORS not in wrong


# --- the command ------------------------------------------------------------------------------------------------------


def run(*words: object) -> int:
    return convert.main([str(word) for word in words])


def test_an_interrupted_conversion_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = trained(tmp_path / "gpt", f"{DEPTHS} 1"), tmp_path / "hybrid"
    monkeypatch.setattr(hybrid, "FILE_BYTES", 10_000)
    original, written = stream.write_chunk, []

    def full(*given: Any) -> Any:
        written.append(given[1])
        if len(written) == 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "write_chunk", full)
        assert run("gpt-to-hybrid", source, target, "--workers", 1) == 2
    assert "no space is left" in capsys.readouterr().err
    assert not target.exists()
    assert len(set(written)) > 5
    with monkeypatch.context() as patch:
        patch.setattr(stream, "write_chunk", lambda *given: (written.append("again"), original(*given))[1])
        assert run("gpt-to-hybrid", source, target, "--resume") == 0
    assert 0 < written.count("again") < len(hybrid.plan_migration(source, True).entries)
    assert failed(verify_forms(source, target)) == []


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = trained(tmp_path / "gpt", f"{DEPTHS} 2"), tmp_path / "hybrid"
    assert run("gpt-to-hybrid", source, target, "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layers"] == "*-*-/*-/*-"
    assert not target.exists()
    assert run("gpt-to-hybrid", source, target, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (
        (said["depths"], said["tensors"]) == (done["depths"], done["tensors"]) == (2, 4 * len(DistReader(source).keys))
    )


def test_the_verify_command_compares_a_gpt_and_a_hybrid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = trained(tmp_path / "gpt", f"{DEPTHS} 1"), tmp_path / "hybrid"
    assert run("gpt-to-hybrid", source, target) == 0
    assert run("verify", target, source) == 0
    capsys.readouterr()
    assert run("verify", source, source) == 2
    assert "are GPT checkpoints; give a GPT and a hybrid" in capsys.readouterr().err
    assert run("gpt-to-hybrid", target, tmp_path / "again") == 2
    assert "is already a hybrid model of layers *-*-/*-; for the reverse, use hybrid-to-gpt." in capsys.readouterr().err
    assert run("verify", source, target, "--text", "x") == 2
    assert "leave --text out" in capsys.readouterr().err


def test_a_converted_model_comes_back_from_its_hybrid_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "source", "glm4_moe", 2)
    assert run("hf-to-mcore", source, tmp_path / "gpt") == 0
    assert run("gpt-to-hybrid", tmp_path / "gpt", tmp_path / "hybrid") == 0
    assert (tmp_path / "hybrid" / TRACKER).read_text() == "release"
    assert failed(verify_forms(tmp_path / "gpt", tmp_path / "hybrid")) == []
    assert run("mcore-to-hf", tmp_path / "hybrid", tmp_path / "folder") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the checkpoint is a hybrid model, and" in said
    assert "describes a GPT; apply hybrid-to-gpt to it." in said
    assert run("hybrid-to-gpt", tmp_path / "hybrid", tmp_path / "again") == 0
    assert run("mcore-to-hf", tmp_path / "again", tmp_path / "folder") == 0
    there, back = read(source), read(tmp_path / "folder")
    assert there.keys() == back.keys()
    assert [key for key in there if not torch.equal(there[key], back[key])] == []


@pytest.mark.parametrize(
    ("stored", "args", "says"),
    [
        ({"distrib_optim_sharding_type": "dp_zero_gather_scatter"}, {}, "in the format dp_zero_gather_scatter, which"),
        ({"distrib_optim_sharding_type": "dp_reshardable"}, {"decoder_first_pipeline_num_layers": 1}, "cut evenly"),
    ],
)
def test_an_optimizer_in_another_order_is_refused(
    stored: dict[str, str], args: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trained(tmp_path / "gpt", f"{DEPTHS} 1")
    common = DistReader(source).common()
    common["args"] = Namespace(**{**vars(common["args"]), **args})
    monkeypatch.setattr(DistReader, "common", lambda _: common | {"content_metadata": stored})
    with pytest.raises(ValueError, match=says) as refused:
        hybrid.plan_migration(source, True)
    assert "--dist-ckpt-optim-fully-reshardable" in str(refused.value)


@pytest.mark.parametrize(("pattern", "ranks"), [("*-|*-*-", 2), ("*-|*-|*-|*-", 2)])
def test_optimizer_buffers_of_uneven_stages_are_rejected(pattern: str, ranks: int) -> None:
    args = Namespace(pipeline_model_parallel_size=ranks)
    common = {"args": args, "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    with pytest.raises(ValueError, match="its stages were not cut evenly"):
        hybrid._check_optimizer(common, f"{pattern}/*-", "checkpoint")
    hybrid._check_optimizer(common, "*-|*-/*-", "checkpoint")
    hybrid._check_optimizer(common, "*-*-/*-", "checkpoint")


def test_a_checkpoint_without_the_layers_of_its_arguments_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trained(tmp_path / "gpt", f"{DEPTHS} 1")
    common = DistReader(source).common()
    common["args"].num_layers = 3
    monkeypatch.setattr(DistReader, "common", lambda _: common)
    with pytest.raises(ValueError, match=r"lacks 'decoder\.layers\.4\..*linear_qkv\.weight'"):
        hybrid.plan_migration(source, True)
