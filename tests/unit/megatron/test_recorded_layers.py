"""Which layers Megatron captures as CUDA graphs in training, counted without a GPU by its own search.

`--cuda-graph-impl transformer_engine` searches a built model for layers; with `local` every layer that can be captured
creates a graph manager when it is built.
"""

from typing import Any

import pytest
from hybrid_single import RECURRENT, our_hybrid
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper, set_current_microbatch
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron_single import LENGTH, MOE, ROWS, our_model
from torch.nn import Module

from megatron_mtp.megatron.flags import UNSUPPORTED

pytestmark = pytest.mark.usefixtures("megatron")

BY_TE, LOCAL = {"cuda_graph_impl": "transformer_engine"}, {"cuda_graph_impl": "local"}
ALL, ATTENTION = list[CudaGraphModule](), [CudaGraphModule.attn]
PATTERNS = {"*-*-/*-": {}, "M-*-/M*-/M*-": RECURRENT}


def found(model: LanguageModule, monkeypatch: pytest.MonkeyPatch) -> list[Module]:
    """Return the layers that Megatron's search finds; it needs Transformer Engine only for capturing."""
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)
    helper = TECudaGraphHelper([model], model.config, LENGTH, ROWS)
    assert len(helper.flattened_callables_is_mtp) == len(helper.flattened_callables)
    return list(helper.flattened_callables)


def managed(model: LanguageModule) -> list[Module]:
    """Return the modules that a training step calls through their graph manager."""
    graphable = [module for module in model.modules() if isinstance(module, GraphableMegatronModule)]
    return [module for module in graphable if module._should_call_local_cudagraph()]


class Manager(Module):
    """A stand-in for Megatron's, which initializes CUDA."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def inner_layers(model: LanguageModule) -> list[Module]:
    """Return the layers of all MTP layers; those of hybrid stacks one by one."""
    return [layer for depth in model.mtp.layers for layer in getattr(depth.tf_layer, "layers", [depth.tf_layer])]


@pytest.mark.parametrize("modules", [ALL, ATTENTION], ids=["whole", "attention"])
@pytest.mark.parametrize("architecture", ["sequential", "parallel"])
@pytest.mark.parametrize("depths", [1, 2])
def test_every_mtp_layer_of_a_gpt_is_recorded(
    depths: int, architecture: str, modules: list[CudaGraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = our_model(depths, architecture=architecture, cuda_graph_modules=modules, **BY_TE)
    layers = found(model, monkeypatch)
    assert len(layers) == 2 + depths
    assert layers == [*model.decoder.layers, *inner_layers(model)]
    set_current_microbatch(model, 3)  # a replay selects a layer's graph by it
    assert [layer.current_microbatch for layer in layers] == [3] * len(layers)


@pytest.mark.parametrize("modules", [ALL, [*ATTENTION, CudaGraphModule.moe_router]], ids=["whole", "router"])
def test_a_depth_with_experts_is_not_recorded(modules: list[CudaGraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron would run the parts that it does not capture without a padding mask."""
    model = our_model(2, cuda_graph_modules=modules, **MOE, **BY_TE)
    assert found(model, monkeypatch) == [*model.decoder.layers]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_mtp_layers_of_a_hybrid_are_left_out_so_that_the_flag_is_refused(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails because Megatron finds the layers of a stack, remove the row, and expect all layers here."""
    model = our_hybrid(pattern, **PATTERNS[pattern], **BY_TE)
    assert found(model, monkeypatch) == [*model.decoder.layers]
    assert "--cuda-graph-impl transformer_engine --hybrid-layer-pattern" in [row.flags for row in UNSUPPORTED]


def test_local_graphs_record_every_layer_of_trunk_and_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.language_module import language_module

    for module in (cuda_graphs, language_module):
        monkeypatch.setattr(module, "CudaGraphManager", Manager)
    models = [our_model(depths, **LOCAL) for depths in (1, 2)]
    models += [our_hybrid(pattern, **fields, **LOCAL) for pattern, fields in PATTERNS.items()]
    counts = []
    for model in models:
        layers = [*model.decoder.layers, *inner_layers(model)]
        assert {*managed(model)} == {*layers}
        counts.append(len(layers))
    assert counts == [2 + 1, 2 + 2, 4 + 2, 4 + 2 * 3]
