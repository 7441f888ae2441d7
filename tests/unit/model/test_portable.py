"""model/{norms,specs}.py: norms against a plain formula, and specs with our modules in place of Megatron's."""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron_single import our_model, transformer_config
from torch import Tensor

from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.specs import with_portable_modules

EPS = 1e-5


def plain_norm(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return hidden / (hidden.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
    centered = hidden - hidden.mean(-1, keepdim=True)
    return centered / (centered.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("centered", [False, True])
def test_values_and_gradients_are_those_of_the_formula(kind: str, centered: bool) -> None:
    norm = PortableNorm(
        transformer_config(1, normalization=kind, layernorm_zero_centered_gamma=centered), 32, EPS
    ).cuda()
    hidden, upstream = torch.randn(5, 3, 32, requires_grad=True), torch.randn(5, 3, 32)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter))
    inputs = [hidden, *norm.parameters()]
    ours = torch.autograd.grad((norm(hidden) * upstream).sum(), inputs)
    plain = plain_norm(hidden, norm.weight + 1 if centered else norm.weight, norm.bias)
    torch.testing.assert_close(norm(hidden), plain, rtol=1e-5, atol=1e-5)
    for one, other in zip(ours, torch.autograd.grad((plain * upstream).sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_zero_centered_norm_starts_as_the_identity_on_normed_values() -> None:
    config = transformer_config(1, layernorm_zero_centered_gamma=True)
    assert torch.equal(PortableNorm(config, 4).weight, torch.zeros(4, device="cpu"))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_weights_record_whether_they_are_sequence_parallel(sequence_parallel: bool) -> None:
    config = transformer_config(1, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    assert [parameter.sequence_parallel for parameter in PortableNorm(config, 4).parameters()] == [sequence_parallel]


def modules_in(spec: Any) -> list[Any]:
    """Return every module in a spec."""
    if not isinstance(spec, ModuleSpec):
        return [spec]
    return [spec.module, *(found for part in vars(spec.submodules).values() for found in modules_in(part))]


def test_every_norm_of_a_spec_is_swapped_and_the_spec_itself_is_left_alone() -> None:
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    swapped = modules_in(with_portable_modules(spec, transformer_config(1)))
    assert modules_in(spec).count(WrappedTorchNorm) == swapped.count(PortableNorm) == 4
    assert WrappedTorchNorm not in swapped


def test_a_model_without_transformer_engine_has_only_portable_norms(megatron: None) -> None:
    norms = [module for module in our_model(2).modules() if "Norm" in type(module).__name__]
    assert len(norms) == 2 * 2 + 1 + 2 * 5
    assert {type(norm) for norm in norms} == {PortableNorm}
