"""Every layout computes what a single process computes (losses, gradients, the step) and loads its checkpoints.

Float32, with the same weights and the same global batch. Differences are max |a - b| / max |b| of a whole tensor.
"""

from typing import Any

import pytest
from layouts import (
    CASES,
    COVERED,
    FIRST,
    FIRST_MOVE,
    KINDS,
    LAYOUTS,
    LOADS,
    MODELS,
    MOVES,
    SINGLE,
    features,
    kinds,
    sources,
)
from records import Records
from torch import Tensor, equal, stack
from torch.distributed.checkpoint import FileSystemReader

from megatron_mtp.megatron.checkpoint.reader import DistReader

TOLERANCE = 1e-5


def relative_difference(value: Tensor, expected: Tensor) -> float:
    """Return the relative difference; 0 if both are all zeros."""
    largest = expected.abs().max().item()
    difference = (value - expected).abs().max().item()
    return difference / largest if largest else difference


def assert_close(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check for the same tensors, each within the tolerance."""
    assert values.keys() == expected.keys()
    differences = {name: relative_difference(values[name], expected[name]) for name in expected}
    assert {name: value for name, value in differences.items() if not value <= TOLERANCE} == {}


def assert_same_step(record: dict[str, Any], single: dict[str, Any]) -> None:
    """Check for the same losses, gradients, gradient norm and weights after the step, and equal copies of each part."""
    assert record["losses"] == pytest.approx(single["losses"], rel=TOLERANCE)
    assert_close(record["gradients"], single["gradients"])
    norms = [(each["grad_norm"], each["mtp_grad_norm"] or 0.0) for each in (record, single)]  # 0: in the main one
    assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)
    assert_close(record["weights"], single["weights"])
    for copies in ("gradients apart", "weights apart"):
        assert {name: value for name, value in record[copies].items() if value > 1e-6} == {}


@pytest.fixture(scope="module")
def records(records: Records, request: pytest.FixtureRequest) -> Records:
    """Run the compared steps ahead of the tests that read them."""
    steps = [
        item for item in request.session.items if item.originalname == "test_a_training_step_matches_a_single_process"
    ]
    cases = [item.callspec.params for item in steps]
    records.expect(f"train/{case['model']}/{layout}" for case in cases for layout in (case["layout"], SINGLE))
    return records


def tiered(case: tuple[str, ...], is_first: bool) -> Any:
    return pytest.param(*case, id="-".join(case), marks=() if is_first else pytest.mark.matrix)


@pytest.mark.parametrize(
    ("model", "layout"),
    [tiered((model, layout), model in FIRST.get(layout, "").split()) for model, layout in CASES],
)
def test_a_training_step_matches_a_single_process(records: Records, model: str, layout: str) -> None:
    record = records.of(f"train/{model}/{layout}")
    counts = {"mtp": MODELS[model].trained, "drafter": MODELS[model].beside}
    named = {f"{name}_{depth} loss" for name, count in counts.items() for depth in range(1, count + 1)}
    assert record["losses"].keys() == {"lm loss"} | named
    single = records.of(f"train/{model}/{SINGLE}")
    assert_same_step(record, single)
    assert record["evaluation"] == pytest.approx(single["evaluation"], rel=TOLERANCE)


def test_the_mtp_layers_have_their_own_rate_norm_and_clip(records: Records) -> None:
    """Adam's first step by hand: w - lr g / (|g| + eps), with gradients clipped in two groups."""
    record = records.of(f"train/grouped-d3/{SINGLE}")
    before = DistReader(records.folder / "init" / "ours" / "grouped-d3" / "iter_0000001")
    groups = {prefix: [] for prefix in ("mtp.", "")}
    for name in record["gradients"]:
        groups["mtp." if name.startswith("mtp.") else ""].append(name)
    rates, clips = {"mtp.": 3e-2, "": 1e-2}, {"mtp.": 0.01, "": 0.02}
    for prefix, names in groups.items():
        norm = stack([record["gradients"][name].norm() for name in names]).norm().item()
        assert norm > clips[prefix]
        assert record["mtp_grad_norm" if prefix else "grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        for name in names:
            clipped = record["gradients"][name] * clips[prefix] / (norm + 1e-6)
            weight = before.read(name)[: len(clipped)]
            moved, expected = record["weights"][name] - weight, -rates[prefix] * clipped / (clipped.abs() + 1e-3)
            assert relative_difference(moved, expected) < 1e-3, name


@pytest.mark.matrix
def test_three_passes_are_three_depths_of_a_repeated_layer(records: Records) -> None:
    passes, depths = (records.of(f"train/{model}/{SINGLE}") for model in ("unrolled-d1", "repeated-d3"))
    assert passes["losses"] == pytest.approx(depths["losses"], rel=1e-6)
    for name in ("gradients", "weights"):
        assert passes[name].keys() == depths[name].keys()
        far = [key for key in depths[name] if relative_difference(passes[name][key], depths[name][key]) > 1e-6]
        assert far == []


def test_the_cases_cover_every_feature_of_a_model_with_every_kind_of_parallelism() -> None:
    met = {
        kind: {each for model, layout in CASES if kind in kinds(layout) for each in features(model)} for kind in KINDS
    }
    assert {kind: COVERED[kind] - met[kind] for kind in KINDS} == {kind: set() for kind in KINDS}
    assert {model for model, _ in CASES} == MODELS.keys() - {"moe-d2"}  # test_interop.py trains it
    assert {layout for _, layout in CASES} == LAYOUTS.keys() - {SINGLE}
    alone = {name for name, layout in LAYOUTS.items() if len(layout.models.split()) == 1}
    assert alone == {"pp2-unbalanced", "pp2-vpp2-hybrid"}  # their flags are one model's pattern


def test_the_first_tier_has_every_kind_of_parallelism() -> None:
    first = [(model, layout) for layout, models in FIRST.items() for model in models.split()]
    assert set(first) <= set(CASES)
    assert {kind for _, layout in first for kind in kinds(layout)} == {*KINDS}


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "layout"), LOADS, ids=["-".join(load) for load in LOADS])
def test_a_layout_loads_the_checkpoints_of_all_layouts(records: Records, model: str, layout: str) -> None:
    """Every bit of the weights, also on ranks that hold copies."""
    differing = records.of(f"load/{model}/{layout}")["differing"]
    assert differing == {source: [] for source in sources(model)}


@pytest.mark.parametrize(("model", "source", "target"), [tiered(move, move == FIRST_MOVE) for move in MOVES])
def test_training_resumes_in_another_layout(records: Records, model: str, source: str, target: str) -> None:
    """The optimizer moves too: the next step equals that of one uninterrupted process."""
    moved = records.of(f"move/{model}/{source}/{target}")
    saved = records.of(f"train/{model}/{source}")["weights"]
    assert [name for name in saved if not equal(moved["loaded"][name], saved[name])] == []
    assert_same_step(moved, records.of(f"move/{model}/{SINGLE}/{SINGLE}"))


def test_a_missing_embedding_group_is_seen(records: Records) -> None:
    """With a planted fault: the last stage's copy of the embedding keeps its gradient to itself."""
    faulty = records.of("train/tied-d3/pp2/no-embedding-group")
    with pytest.raises(AssertionError):
        assert_same_step(faulty, records.of(f"train/tied-d3/{SINGLE}"))
    assert faulty["gradients apart"]["embedding.word_embeddings.weight"] > 0.1


def test_tied_embeddings_over_two_stages_can_be_saved(records: Records) -> None:
    """Megatron 0.19.2 fails an assertion on the last stage."""
    assert records.of("save_entries/tied-d3/pp2/ours")["errors"] == [None, None]
    first_stage, last_stage = records.of("save_entries/tied-d3/pp2/megatron")["errors"]
    assert first_stage is None
    assert last_stage.startswith("AssertionError")
    assert "'output_layer.weight'" in last_stage


@pytest.mark.parametrize("model", ["frozen-d3", "frozen-moe-d3"])
def test_training_only_mtp_layers_keeps_the_trunk_bit_identical(records: Records, model: str) -> None:
    """Including routers and their biases; the optimizer only has the MTP layers."""
    trained = records.of(f"train/{model}/{SINGLE}")["weights"]
    before = DistReader(records.folder / "init" / "ours" / model / "iter_0000001")
    changed = {name for name, weight in trained.items() if not equal(weight, before.read(name))}
    assert {name for name in trained if name.startswith("mtp.layers.0.")} <= changed
    assert all(name.startswith("mtp.") for name in changed)
    saved = FileSystemReader(records.folder / "trained" / f"{model}-{SINGLE}" / "iter_0000001").read_metadata()
    states = [key for key in saved.state_dict_metadata if key.startswith("optimizer.state.")]
    assert states
    assert all(".mtp." in key for key in states)
