"""Imports for a user's own script: Megatron's functions next to ours, and an error if it is only partly changed."""

import sys
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.training import argument_utils

from megatron_mtp.model.arguments import MTPHybridModelConfig
from megatron_mtp.training import megatron_lm

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--position-embedding-type rope --micro-batch-size 1 --train-iters 1 --eval-interval 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 99 --mtp-num-layers 2 --greeting hello"
)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the user's flags."""
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in single.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["my_pretrain.py", *FLAGS.split()])
    return sys.argv


def add_greeting(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--greeting")
    return parser


def test_users_arguments_are_parsed_with_megatrons_and_ours(command_line: list[str], megatron: None) -> None:
    args = megatron_lm.parse_and_validate_args(add_greeting, args_defaults={"lr_decay_style": "cosine"})
    assert (args.greeting, args.mtp_num_layers, args.mtp_architecture) == ("hello", 2, "sequential")
    model = megatron_lm.model_provider()
    assert type(model) is GPTModel
    assert len(model.mtp.layers) == 2
    with pytest.raises(TypeError, match="give a subclass of MTPGPTModelConfig"):
        megatron_lm.gpt_config_from_args(args, model_config_cls=argument_utils.GPTModelConfig)
    with pytest.raises(TypeError, match=r"a GPTModelConfig; .* gpt_config_from_args of megatron_mtp"):
        megatron_lm.pretrain(SimpleNamespace(model=argument_utils.gpt_config_from_args(args)), None)


def test_a_hybrid_script_gets_a_hybrid(
    command_line: list[str], megatron: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line += ["--hybrid-layer-pattern", "M-*-/*-/*-", "--mamba-head-dim", "8", "--mamba-state-dim", "8"]
    args = megatron_lm.parse_and_validate_args(add_greeting)
    assert isinstance(megatron_lm.hybrid_config_from_args(args), MTPHybridModelConfig)
    model = megatron_lm.model_provider()
    assert type(model) is HybridModel
    assert [len(layer.tf_layer.layers) for layer in model.mtp.layers] == [2, 2]
    with pytest.raises(SystemExit):
        megatron_lm.gpt_config_from_args(args)
    assert "configuration of another class of model; call hybrid_config_from_args there" in capsys.readouterr().err
    with pytest.raises(TypeError, match=r"a HybridModelConfig; .* hybrid_config_from_args of megatron"):
        megatron_lm.pretrain(SimpleNamespace(model=argument_utils.hybrid_config_from_args(args)), None)


def test_a_bad_flag_is_rejected_with_a_clear_error(command_line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command_line += ["--mtp-architecture", "diagonal"]
    with pytest.raises(SystemExit) as exit_info:
        megatron_lm.parse_and_validate_args(add_greeting)
    assert exit_info.value.code == 2
    assert "my_pretrain.py: error: --mtp-architecture is 'diagonal'; choose one of" in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"forward_step_func": print}, {"model_provider": print}])
def test_arguments_that_would_not_train_the_mtp_layers_are_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="take them out of the call"):
        megatron_lm.pretrain(SimpleNamespace(model=None), None, ModelType.encoder_or_decoder, **given)
