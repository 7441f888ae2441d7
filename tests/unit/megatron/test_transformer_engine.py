"""Checkpoints of Transformer Engine's modules: loaded, converted and loaded again, without a GPU.

Its modules are built in a separate process, because `prepare()` hides them on a CPU.
"""

import subprocess
import sys
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from te_cases import FIRST_PASS, KINDS, OF_MEGATRON, STATES, WEIGHTS, passes

from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli.main import main
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.loading import plan_load

try:
    version("transformer-engine")
except PackageNotFoundError:
    pytest.skip(
        "Transformer Engine is not installed; scripts/test_te.sh installs it and runs this", allow_module_level=True
    )

FUSED = "linear_qkv_down_proj"
"""Down-projections of queries, keys and values as one weight, which Megatron saves as two."""

NAMES = {
    f"self_attention.{FUSED}.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
"""Where Transformer Engine's modules have a norm, and where Megatron's own have it."""


def run(part: str, folder: Path) -> None:
    code = (
        "from megatron_mtp.megatron import runtime; runtime.hide_transformer_engine = lambda: None; "
        f"runtime.quieten(); import te_cases; te_cases.{part}({str(folder)!r})"
    )
    place = Path(__file__).parents[2] / "support"
    made = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("te")
    run("save", folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_portable_modules_have_the_weights(kind: str, saved: Path) -> None:
    given, model = load_file(saved / kind / WEIGHTS), load_model(saved / kind)
    found = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, value in given.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        parts = [name.replace(FUSED, one) for one in ("linear_q_down_proj", "linear_kv_down_proj")]
        held = [found.pop(one) for one in (parts if FUSED in name else [name])]
        assert torch.equal(value, torch.cat(held)), name
    assert not found


@pytest.mark.parametrize("kind", KINDS)
def test_its_checkpoint_drafts_as_the_portable_model(kind: str, saved: Path) -> None:
    def texts(runner: Runner) -> list[list[int]]:
        return generate(runner, [[1, 2, 3], [4, 5]], 8, speculative={"method": "mtp"}).token_ids

    assert texts(load_runner(saved / kind)) == texts(Runner(load_model(saved / kind)))


def test_later_passes_attend_to_the_keys_of_the_first(tmp_path: Path) -> None:
    """In Megatron's layer with TE modules, our class supplies queries and keys; the kernels have stand-ins here."""
    run("first_pass", tmp_path)
    for kind in FIRST_PASS:
        theirs, ours = load_file(tmp_path / kind / STATES), passes(load_model(tmp_path / kind))
        for name, value in theirs.items():
            assert torch.allclose(value, ours[name], rtol=1e-4, atol=1e-5), (kind, name)


def test_norms_of_plain_queries_are_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: Megatron's own module has them, and they were silently dropped."""
    folder = saved / OF_MEGATRON
    assert any("linear_q_proj.layer_norm_weight" in name for name in load_file(folder / WEIGHTS))
    with pytest.raises(ValueError, match="has norms in front of linear_q_proj"):
        load_runner(folder)
    run = Namespace(
        load=str(folder), pretrained_checkpoint=None, ckpt_step=None, non_persistent_ckpt_type=None, finetune=False
    )
    with pytest.raises(ValueError, match=r"--load .* has norms in front of linear_q_proj"):
        plan_load(run, MTPConfig())
    assert main(["convert", "mcore-to-hf", str(folder), str(saved / "none")]) == 2
    assert "linear_q_proj.layer_norm_weight" in capsys.readouterr().err


def test_a_conversion_loads_into_transformer_engine(saved: Path) -> None:
    """All but one, whose router has no Hugging Face format."""
    for kind in KINDS.keys() - {"moe"}:
        exported, converted = saved / "exported" / kind, saved / "converted" / kind
        assert main(["convert", "mcore-to-hf", str(saved / kind), str(exported)]) == 0, kind
        assert main(["convert", "verify", str(exported), str(saved / kind)]) == 0, kind
        assert main(["convert", "hf-to-mcore", str(exported), str(converted)]) == 0, kind
    run("load", saved)
