"""--mtp-unroll: a repeated layer with D = 1, trained for K passes, equals the model with K depths."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from megatron.core import dist_checkpointing
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron_single import LENGTH, VOCABULARY, backward_ours, gradients, make_batch, randomize, relative_difference

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore, set_passes
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig
from megatron_mtp.checkpoint.model import model_of
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.megatron.checkpoint.iterations import iteration_folder
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.parser import CUDA, flags_without
from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import trained_depths
from megatron_mtp.training.arguments import parse_run_args
from megatron_mtp.training.run import with_passes

FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --normalization RMSNorm --swiglu "
    f"--disable-bias-linear --position-embedding-type rope --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --mtp-use-repeated-layer"
).split()
QUIET = Options(quiet=True, workers=1)
MIXTURE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1".split()
)


def arguments(depths: int, passes: int | None = None, more: list[str] | None = None) -> Namespace:
    args = parsed([*FLAGS, *(more or []), "--mtp-num-layers", str(depths)], VOCABULARY)
    args.mtp_unroll = passes
    return args


def model(args: Namespace) -> LanguageModule:
    made = model_of(args)
    randomize(made)
    return made.train()


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("more", [[], MIXTURE], ids=["dense", "moe"])
def test_passes_have_the_losses_and_gradients_of_depths(more: list[str]) -> None:
    batch, found = make_batch(5), []
    for args in (arguments(1, 5, more), arguments(5, None, more)):
        one = model(args)
        found.append((backward_ours(one, batch), gradients(one)))
    (losses, grads), (expected, expected_grads) = found
    assert losses.numel() == 6
    assert relative_difference(losses, expected) <= 1e-6
    assert grads.keys() == expected_grads.keys()
    assert max(relative_difference(grads[name], expected_grads[name]) for name in grads) <= 1e-6


@pytest.mark.usefixtures("megatron")
def test_the_checkpoint_has_one_layer_and_the_drafter_all_passes() -> None:
    made = model(arguments(1, 4))
    assert len(made.mtp.layers) == 1
    assert {key.split(".")[2] for key in made.sharded_state_dict() if key.startswith("mtp.layers.")} == {"0"}
    runner = Runner(made)
    for method in ("mtp", "mtp_eagle"):
        assert make_method(runner, config_from({"method": method}), Sampling()).count == 4


def test_passes_of_a_repeated_layer_count_as_depths() -> None:
    assert trained_depths(Namespace(mtp_num_layers=1, mtp_unroll=5)) == 5
    assert trained_depths(Namespace(mtp_num_layers=3)) == 3
    assert trained_depths(Namespace(mtp_num_layers=None, mtp_unroll=5)) == 0
    assert MTPConfig(mtp_unroll=2, mtp_loss_weights="1,0.5").loss_weights(2) == [1.0, 0.5]


@pytest.mark.usefixtures("megatron")
def test_an_exported_folder_says_how_many_passes_were_trained_and_an_import_reads_it(tmp_path: Path) -> None:
    args = arguments(1, 4)
    source = tmp_path / "run" / "iter_0000001"
    save(model(args), args, source)
    mcore_to_hf(source, tmp_path / "hf", QUIET, form_of(source))
    keys = json.loads((tmp_path / "hf" / CONFIG).read_text())
    assert (keys["num_nextn_predict_layers"], keys["mtp_unroll"]) == (1, 4)
    hf_to_mcore(tmp_path / "hf", tmp_path / "back", QUIET)
    back = DistReader(iteration_folder(tmp_path / "back")).common()["args"]
    assert (back.mtp_num_layers, back.mtp_use_repeated_layer, trained_depths(back)) == (1, True, 4)


@pytest.mark.usefixtures("megatron")
def test_a_layer_trained_without_a_chain_is_not_exported(tmp_path: Path) -> None:
    """Engines draft from only the keys of pass 1 if the model has an indexer."""
    args = arguments(1, 4)
    args.mtp_repeated_layer_first_pass_kv = True
    source = tmp_path / "run" / "iter_0000001"
    save(model(args), args, source)
    with pytest.raises(ValueError, match=r"trained without a chain .*, and engines draft with one"):
        mcore_to_hf(source, tmp_path / "hf", QUIET, form_of(source))
    assert not (tmp_path / "hf").exists()


@pytest.mark.usefixtures("megatron")
def test_a_checkpoint_whose_depth_had_one_pass_is_trained_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = arguments(1)
    stored.mtp_use_repeated_layer = False
    save(model(stored), stored, tmp_path / "iter_0000001")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    words = (
        f"--use-checkpoint-args --load {tmp_path} --finetune --mtp-use-repeated-layer --mtp-unroll 3 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 90 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 "
        "--lr 1e-3 --eval-interval 1 --eval-iters 1"
    ).split()
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words, *flags_without(CUDA)])
    monkeypatch.setenv("WORLD_SIZE", "1")
    args = parse_run_args()
    assert (args.num_layers, args.mtp_num_layers, args.mtp_use_repeated_layer) == (2, 1, True)
    assert trained_depths(args) == 3


@pytest.mark.usefixtures("megatron")
def test_a_folder_with_no_number_of_passes_is_refused(tmp_path: Path) -> None:
    config = HFConfig.from_keys({"model_type": "glm4_moe", "mtp_unroll": 0})
    with pytest.raises(ValueError, match="'mtp_unroll' is 0; it must be a whole number of at least 1"):
        set_passes(arguments(1), config)


def save(made: LanguageModule, args: Namespace, folder: Path) -> None:
    folder.mkdir(parents=True)
    args.tokenizer_model = None
    entries = {"model": made.sharded_state_dict(), "args": args, "checkpoint_version": 3.0, "iteration": 1}
    dist_checkpointing.save(entries, str(folder))


def test_flops_are_counted_for_every_pass() -> None:
    args = Namespace(mtp_num_layers=1, mtp_unroll=3, hybrid_layer_pattern="M-*-/*-")
    counted = with_passes(args)
    assert (counted.mtp_num_layers, counted.hybrid_layer_pattern) == (3, "M-*-/*-/*-/*-")
    assert (args.mtp_num_layers, args.hybrid_layer_pattern) == (1, "M-*-/*-")
