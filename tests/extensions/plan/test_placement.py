"""Placements against Megatron's own layouts."""

import pytest
from lines import line_of, words_of
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_mtp.extensions.plan.launch import read
from megatron_mtp.extensions.plan.placement import Loads, Placement, balanced, even, flags_of, of_counts, of_line

KINDS = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}


def stages_in_megatron(layout: str, ranks: int, depths: int) -> list[str]:
    """Return a layout as Megatron parses and checks it, chunk by chunk in model order."""
    parsed = PipelineParallelLayerLayout(layout, ranks)
    parsed.validate_layer_layout(parsed.flatten_layout.count(LayerType.decoder), depths or None)
    virtual = parsed.virtual_pipeline_model_parallel_size
    rows = [parsed.layout[rank][stage] for stage in range(virtual) for rank in range(ranks)]
    return ["".join(KINDS[kind] for kind in row) for row in rows]


def strings(placement: Placement) -> list[str]:
    return [str(chunk) for chunk in placement.chunks]


@pytest.mark.parametrize(
    "placement",
    [
        even(61, 1, 8, 4),
        even(7, 2, 4, 1),
        of_counts([3, *[2] * 29, 0, 0], 1, 16, alone=True),
        of_counts([4, 3, 0, 0], 3, 4, alone=True),
        of_counts([1, 0, 0, 6], 0, 4),
        even(5, 1, 1, 1),
    ],
    ids=lambda one: one.layout(),
)
def test_a_layout_is_what_megatron_reads(placement: Placement) -> None:
    depths = sum(chunk.depths for chunk in placement.chunks)
    assert stages_in_megatron(placement.layout(), placement.ranks, depths) == strings(placement)


def test_layouts_are_short() -> None:
    assert even(61, 1, 8, 4).layout() == "Ett|(tt|)*28t|t|tmL"


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-h100", "deepseek-v3-h100-offloaded", "deepseek-proxy"])
def test_a_pipeline_layout_is_parsed_as_in_megatron(name: str) -> None:
    line = line_of(name)
    assert line.pipeline_model_parallel_layout is not None
    placement = of_line(line, line.whole("num_layers"))
    assert strings(placement) == stages_in_megatron(line.pipeline_model_parallel_layout, placement.ranks, 1)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("glm4.5", [23] * 4),
        ("deepseek-v3-uneven-stages", [6, *[8] * 6, 7]),
        ("llama3.1-405b", [0, *[1] * 126, 0]),
        ("glm4.5-uneven-stages", [23] * 4),
        ("llama2-70b", [5] * 16),
    ],
)
def test_flags_of_stages(name: str, counts: list[int]) -> None:
    line = line_of(name)
    placement = of_line(line, line.whole("num_layers"))
    assert [chunk.end - chunk.first for chunk in placement.chunks] == counts


def test_layers_that_do_not_divide_over_stages_are_rejected() -> None:
    with pytest.raises(ValueError, match="61 layers do not divide over 4 pipeline ranks"):
        of_line(read("--num-layers 61 --pipeline-model-parallel-size 4".split()), 61)
    line = read("--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|L".split())
    with pytest.raises(ValueError, match="has 1 layers and 0 MTP layers"):
        of_line(line, 2)


def test_the_balanced_placement_lightens_the_last_stage() -> None:
    """A head of 2 and an MTP layer of 1.5 next to layers of 1: 15.5 in total, so 4 stages have at most 4 each."""
    loads = Loads((1.0,) * 12, 0.0, 1.5, 2.0)
    assert strings(balanced(loads, 1, 4, 1)) == ["Etttt", "tttt", "tttt", "mL"]
    assert strings(balanced(loads, 0, 4, 1))[-1] == "ttL"
    assert strings(balanced(Loads((1.0,) * 12, 0.0, 3.0, 4.0), 1, 4, 1, alone=True))[-2:] == ["m", "L"]


def test_a_placement_replaces_the_flags_of_the_launch_line() -> None:
    words = words_of("qwen3-235b-a22b")
    line = read(words)
    made = flags_of(even(94, 2, 8, 2), line, words)
    assert made[-4:] == ["--mtp-num-layers", "2", "--pipeline-model-parallel-layout", even(94, 2, 8, 2).layout()]
    assert not {"--account-for-loss-in-pipeline-split", "--num-layers-per-virtual-pipeline-stage"} & {*made}
    assert read(made).whole("num_layers") == 94


def test_a_hybrids_stages_are_written_into_its_pattern() -> None:
    words = "--hybrid-layer-pattern GEGE*E/*E --mtp-num-layers 1 --pipeline-model-parallel-size 2".split()
    made = flags_of(of_counts([4, 2], 1, 2), read(words), words)
    assert made[-2:] == ["--hybrid-layer-pattern", "GEGE|*E/*E"]
