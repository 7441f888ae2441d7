"""checkpoint/convert/fitting_drafter.py: the fit against float64 least squares on transformers' states."""

from pathlib import Path

import pytest
import torch
from drafter_folders import OWN_SIZES, make_drafter, make_trunk
from hf_models import HIDDEN, VOCABULARY, make
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM
from written_datasets import write_random_dataset

from megatron_mtp.checkpoint.convert.fitting import FitData
from megatron_mtp.checkpoint.convert.fitting_drafter import RIDGE, SCORE
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.model.attachment import attached_of

pytestmark = pytest.mark.usefixtures("megatron")

SEED, READ = 1234, (1, 2, 3)
KEY = "drafter.{}.weight"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_random_dataset(tmp_path / "corpus", VOCABULARY)


def fitted(source: Path, corpus: str, *flags: str) -> Path:
    """Create a checkpoint with a fitted drafter next to the folder."""
    mcore, new = source.parent / "mcore", source.parent / "new"
    assert main(["hf-to-mcore", str(source), str(mcore)]) == 0
    words = ["--data-path", corpus, "--drafter-layers", *map(str, READ), *flags]
    assert main(["fit-drafter", str(mcore), str(new), *words]) == 0
    return new


def least_squares(pairs: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return weights [H, X] from inputs, targets, and the values by whose size both are divided."""
    sizes = [sized.square().mean(-1, keepdim=True).sqrt() for *_, sized in pairs]
    given = torch.cat([one / size for (one, *_), size in zip(pairs, sizes, strict=True)])
    wanted = torch.cat([one / size for (_, one, _), size in zip(pairs, sizes, strict=True)])
    added = (RIDGE * given.square().sum(0)).sqrt().diag()
    right = torch.cat([wanted, wanted.new_zeros(len(added), wanted.size(1))])
    return torch.linalg.lstsq(torch.cat([given, added]), right, driver="gelsd").solution.T


def test_fitted_parts_are_the_least_squares_fit_of_the_trunks_states(tmp_path: Path, corpus: str) -> None:
    source = make(tmp_path / "hf", "llama", 0, changes={"num_hidden_layers": 4})
    found = DistReader(fitted(source, corpus))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    between: list[Tensor] = []
    norm = model.model.layers[-1].post_attention_layernorm
    made: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, given: between.append(given[0][0]))
    model.model.norm.register_forward_pre_hook(lambda _, given: made.append(given[0][0]))
    texts, of_fc, of_residual = FitData(corpus).texts(HIDDEN, SEED), [], []
    for number, text in enumerate([*texts[::2], *texts[1::2]]):
        with torch.no_grad():
            states = model(text[None], output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0] for layer in READ], dim=-1)
        if number < len(texts[::2]):
            of_fc.append((read, made[-1], made[-1]))
            continue
        feature = read @ least_squares(of_fc).T
        halves = [rms_norm(one, one.shape[-1:], eps=1e-5) for one in (states[0][0, 1:], feature[:-1])]
        of_residual.append((torch.cat(halves, -1), between[-1][1:] - feature[:-1], between[-1][1:]))
    torch.testing.assert_close(found.read(KEY.format("fc")).double(), least_squares(of_fc), atol=2e-3, rtol=0)
    best = least_squares(of_residual)
    given = torch.cat([one / sized.square().mean(-1, keepdim=True).sqrt() for one, _, sized in of_residual])
    groups, channels = model.config.num_key_value_heads, model.config.head_dim
    heads = model.config.num_attention_heads // groups
    qkv, proj = (found.read(KEY.format(f"tf_layer.self_attention.linear_{name}")).double() for name in ("qkv", "proj"))
    value, output = (
        qkv.view(groups, heads + 2, channels, -1)[:, -1],
        proj.view(HIDDEN, groups, heads, channels)[:, :, 0],
    )
    ours = output.flatten(1) @ value.flatten(0, 1)
    left, sizes, right = torch.linalg.svd(given @ best.T, full_matrices=False)
    rank = groups * channels
    nearest = left[:, :rank] * sizes[:rank] @ right[:rank]  # the closest output of this rank to the optimum
    torch.testing.assert_close(given @ ours.T, nearest, atol=1e-3 * nearest.abs().max().item(), rtol=0)
    assert (given @ best.T - nearest).abs().max() > 0.05 * nearest.abs().max()  # the rank limits it


def test_a_fitted_drafter_copies_the_trunk_and_attends_to_itself(tmp_path: Path, corpus: str) -> None:
    drafted = tmp_path / "drafted"
    drafted.write_text("5\n3\n40\n")
    new = fitted(
        make(tmp_path / "hf", "llama", 0, changes={"num_hidden_layers": 4}),
        corpus,
        "--mtp-draft-vocab-file",
        str(drafted),
    )
    # needed for training
    assert f"{KEY.format('fc').removesuffix('weight')}_extra_state/shard_0_1" in DistReader(new).objects
    model = load_model(new)
    layer, last = model.mtp.layer, model.decoder.layers[-1]
    assert torch.equal(layer.head, attached_of(model).head().weight[[3, 5, 40]])
    assert torch.equal(layer.norm.weight, model.decoder.final_layernorm.weight)
    for name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
        assert torch.equal(layer.tf_layer.get_parameter(name), last.get_parameter(name))
    attention = layer.tf_layer.self_attention
    groups, channels = model.config.num_query_groups, model.config.kv_channels
    mixed = attention.linear_qkv.weight.view(groups, -1, channels, 2 * HIDDEN)
    tokens = torch.arange(3, VOCABULARY)
    both = torch.cat([rms_norm(model.embedding.word_embeddings.weight[tokens], (HIDDEN,), eps=1e-5)] * 2, dim=-1)
    for group in range(groups):
        query, key = (both @ mixed[group, part].T for part in (0, -2))
        products = query @ key.T / channels**0.5
        own, others = products.diagonal(), products[~torch.eye(len(tokens), dtype=torch.bool)]
        assert own.mean().item() == pytest.approx(SCORE, rel=0.2)
        assert others.mean().abs() < 1


def test_a_fitted_drafter_replaces_one_with_other_attention_heads(tmp_path: Path, corpus: str) -> None:
    _, trunk = make_trunk(tmp_path)
    _, before = make_drafter(tmp_path, "eagle3-whole", trunk, OWN_SIZES)
    new = tmp_path / "new"
    assert main(["fit-drafter", str(before), str(new), "--data-path", corpus]) == 0
    sizes = [attached_of(load_model(folder)).drafter.attention for folder in (before, new)]
    assert [one.heads for one in sizes] == [OWN_SIZES["num_attention_heads"], 4]
    assert sizes[1].scaling is None


def test_trunks_without_a_dense_last_layer_cannot_be_fitted(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mcore, new = tmp_path / "mcore", tmp_path / "new"
    assert main(["hf-to-mcore", str(make(tmp_path / "hf", "glm4_moe", 0)), str(mcore)]) == 0
    capsys.readouterr()
    assert main(["fit-drafter", str(mcore), str(new), "--data-path", corpus]) == 2
    assert "does not end with a dense layer as Llama's" in capsys.readouterr().err
    assert not new.exists()


def test_a_target_inside_the_source_is_refused_before_the_fit(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mcore = tmp_path / "mcore"
    assert (
        main(["hf-to-mcore", str(make(tmp_path / "hf", "llama", 0, changes={"num_hidden_layers": 4})), str(mcore)]) == 0
    )
    files = sorted(mcore.rglob("*"))
    capsys.readouterr()
    for flags in ([], ["--dry-run"]):
        words = [str(mcore), str(mcore / "new"), "--data-path", corpus, "--drafter-layers", *map(str, READ), *flags]
        assert main(["fit-drafter", *words]) == 2
        assert "which it is made from; name a place outside" in capsys.readouterr().err
    assert sorted(mcore.rglob("*")) == files
