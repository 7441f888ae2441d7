"""Megatron's flags reach the datasets."""

import sys
from argparse import Namespace

import pytest
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.arguments import parse_args

from megatron_mtp.training import datasets
from megatron_mtp.training.datasets import dataset_config


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "get_tokenizer", lambda: Namespace(eod=0, pad=1, vocab_size=99, unique_identifiers={})
    )


def parsed(flags: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags.split()])
    args = parse_args()
    args.data_parallel_size = 1
    return args


def test_settings_come_from_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--data-path 1 a 3 b --seq-length 64 --seed 7 --split 9,1,0 --eod-mask-loss --reset-position-ids"
    config = dataset_config(parsed(flags, monkeypatch))
    assert type(config) is GPTDatasetConfig
    assert (config.sequence_length, config.random_seed, config.split) == (64, 7, "9,1,0")
    assert config.blend == (["a", "b"], [0.25, 0.75]) or config.blend == (["a", "b"], [1.0, 3.0])
    assert config.eod_mask_loss
    assert config.reset_position_ids
    assert not config.reset_attention_mask
