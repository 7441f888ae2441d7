"""Any bytes in a header and any values in a config give a result or a ValueError, quickly."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_mtp.checkpoint.families import FAMILIES, Layout, family_of
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.hf.folder import stored_in

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "type"]), st.text(max_size=4), max_size=2),
)
OTHERS = "rope_parameters rope_scaling rope_theta hidden_act layer_types text_config use_sliding_window".split()
KEYS = sorted({*SIZES, *OTHERS, *(key for model in MODELS.values() for key in {**model.config, **model.keys})})
SLOW = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


@settings(max_examples=500, deadline=5000, suppress_health_check=SLOW)
@given(
    name=st.sampled_from(sorted(MODELS)),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4),
    depths=st.integers(0, 2),
)
def test_any_config_is_read_or_refused(name: str, changes: dict[str, Any], depths: int) -> None:
    model = MODELS[name]
    keys = {**SIZES, **model.config, "model_type": model.model_type, **model.keys, **changes}
    with suppress(ValueError):  # including UntrainableError
        config = HFConfig.from_keys(keys)
        family = family_of(config)
        stored = family.depths
        most = depths if stored is None or stored.limit is None else stored.limit
        layout = Layout(min(depths, most), frozenset(family.features))
        assert family.all_rules(config, layout)
        if family.flags is not None:
            assert all(isinstance(word, str) for word in family.flags(config, layout))


@settings(max_examples=500, deadline=5000, suppress_health_check=SLOW)
@given(cut=st.integers(0, 400), change=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), max_size=6))
def test_any_header_is_read_or_refused(tmp_path: Path, cut: int, change: list[tuple[int, int]]) -> None:
    file = tmp_path / "a.safetensors"
    if not (tmp_path / "whole").exists():
        save_file({"a.weight": torch.ones(4, 3), "b.bias": torch.ones(5)}, tmp_path / "whole")
    data = bytearray((tmp_path / "whole").read_bytes())
    for place, value in change:
        data[place % len(data)] = value
    file.write_bytes(bytes(data[: cut or len(data)]))
    with suppress(ValueError):
        assert stored_in(file).keys() <= {"a.weight", "b.bias"} or change


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"model_type": 3}', '{"model_type": "llama"}', "\ud800"]
)
def test_an_invalid_config_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"config\.json"):
        FAMILIES["llama"].all_rules(HFConfig.read(tmp_path), Layout(0))


def test_the_fuzzed_configs_are_valid_without_changes() -> None:
    known = (model for model in MODELS.values() if model.model_type in FAMILIES)  # the others need their text_config
    for model in known:
        keys = {**SIZES, **model.config, "model_type": model.model_type, **model.keys}
        config = HFConfig.from_keys(json.loads(json.dumps(keys)))
        family = family_of(config)
        assert family.all_rules(family.complete(config), Layout(min(model.depths)))
