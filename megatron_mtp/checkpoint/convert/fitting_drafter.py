"""fit-drafter: initialize an EAGLE-3 drafter as one more step of the trunk, by least squares over text.

The drafter's MLP with its norm, its final norm and its output layer are the trunk's last ones. Its residual and
attention produce what enters that MLP one position later. With s_i the states that are read, y_i the last layer's
output, z_i the state between its attention and its MLP, and m a mean square:

    fc = argmin sum_i |fc s_i - y_i|^2 / m(y_i) + ridge                     f_i = fc s_i
    W  = argmin sum_i |W u_i - (z_{i+1} - f_i)|^2 / m(z_{i+1}) + ridge      u_i = [norm(embedding(t_{i+1})); norm(f_i)]

f_i approximates y_i, because step k reads the state of step k - 1 in its place. Attention computes W u_i if a position
attends only to itself, but with the rank of its values, which is G C. So W is replaced by P P^T W, the best one of this
rank on the same sums (reduced-rank regression): P^T W are the values, and P the output of one head in each group. This
head's queries and keys are the same random directions of the embedding, so that a token's product with itself is
`SCORE`. The other heads are drawn as in a new model. fc is fitted on every other text and W on the remaining ones,
because u needs fc.

Letters in names: S positions of a text, N positions of a sum, H hidden, X states that are read side by side, G groups
of heads, M heads of a group, C channels of a head.
"""

from argparse import Namespace
from dataclasses import asdict, dataclass
from functools import cache, partial
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from megatron_mtp.checkpoint.convert.drafter_form import HEAD, VOCABULARY
from megatron_mtp.checkpoint.convert.edit import NewDrafts, changed, changed_args
from megatron_mtp.checkpoint.convert.fitting import Fit, FitData, Moments, run_trunk
from megatron_mtp.checkpoint.convert.stream import Conversion, Group
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.common.progress import progress_bar
from megatron_mtp.megatron.checkpoint import DRAFTER, EMBEDDING
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.model.arguments import check_trainable, trunk_spec
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.initialize import RandomWeights, normal_by_name
from megatron_mtp.model.stored_arguments import stored_with
from megatron_mtp.spec.attention import AttentionSizes
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.kinds import fitted_kind

LAYER = f"{DRAFTER}tf_layer."
QKV, PROJ = f"{LAYER}self_attention.linear_qkv.weight", f"{LAYER}self_attention.linear_proj.weight"
COPIED = "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
"""Parts that the layer copies from the trunk's last one."""

RIDGE = 1e-3
"""Ridge, relative to each entry of a sum's diagonal."""

SCORE = 13.0
"""Score of a position with itself; its weight in the softmax then exceeds that of a whole text by far."""


def plan_fitting(
    source: Path, layers: list[int] | None, drafted: list[int] | None, data: FitData, seed: int, quiet: bool
) -> Conversion:
    """Plan `fit-drafter`, from names and shapes alone.

    Args:
        source: the trunk's checkpoint; MTP layers or a drafter in it are left out.
        layers: numbers of the layers that the drafter reads; None for the default.
        drafted: ids of the draft vocabulary, ascending; None for all tokens.
        data, seed: data to fit on; the seed of its texts and of random weights.

    Raises:
        ValueError: the layers do not exist, the trunk's last layer is of a kind that drafters do not have, or as in
            `Fit`.
    """
    reader = DistReader(source)
    trunk = reader.common()["args"]
    check_trainable(trunk, str(source))
    is_same = trunk.swiglu and trunk.normalization == "RMSNorm" and not trunk.layernorm_zero_centered_gamma
    if not is_same or trunk.num_experts or trunk.add_bias_linear or getattr(trunk, "hybrid_layer_pattern", None):
        raise ValueError(
            f"{source} does not end with a dense layer as Llama's, which alone is copied; begin with random weights "
            f"(train --drafter {fitted_kind().name}, attach --drafter-init random)."
        )
    kind = HeadSpec.resolve(fitted_kind().name, {"drafter_layers": layers}, trunk_spec(trunk))
    plain = {"drafter": None, "mtp_num_layers": None, "mtp_use_repeated_layer": False, "mtp_unroll": None}
    trunk = changed_args(reader, **plain)["args"]
    fit = Fit(reader, trunk, trunk.num_layers - 1, data, seed)
    drafted_N = None if drafted is None else torch.tensor(drafted)
    weights = cache(partial(fitted, fit, kind, drafted_N, seed, quiet))
    dtype = reader.dtype(EMBEDDING)
    made = [
        Group.single(key, shape, dtype, lambda key=key: weights()[key].to(dtype))  # type: ignore[misc]
        for key, shape in _shapes(kind, trunk.hidden_size, len(drafted or ())).items()
    ]
    if drafted_N is not None:
        made.append(Group.single(VOCABULARY, (len(drafted_N),), drafted_N.dtype, drafted_N.clone))
    record = {"fit": asdict(data), "seed": seed, "layers": kind.layers, "drafted": drafted}
    return changed(reader, source, NewDrafts(0, made, record, stored_with(kind, trunk), begin=weights))


def _shapes(kind: HeadSpec, hidden: int, drafted: int) -> dict[str, Shape]:
    sizes = kind.attention
    return {
        f"{DRAFTER}fc.weight": (hidden, len(kind.layers) * hidden),
        f"{DRAFTER}norm.weight": (hidden,),
        **{f"{LAYER}input_layernorm.{name}.weight": (hidden,) for name in ("enorm", "hnorm")},
        QKV: ((sizes.heads + 2 * sizes.groups) * sizes.channels, 2 * hidden),
        PROJ: (hidden, sizes.heads * sizes.channels),
        **{f"{LAYER}{COPIED[0]}": (hidden,), f"{LAYER}{COPIED[1]}": (2 * kind.ffn, hidden)},
        f"{LAYER}{COPIED[2]}": (hidden, kind.ffn),
        **({HEAD: (drafted, hidden)} if drafted else {}),
    }


@torch.no_grad()
def fitted(fit: Fit, kind: HeadSpec, drafted_N: Tensor | None, seed: int, quiet: bool) -> dict[str, Tensor]:
    """Return the drafter's tensors by key, float32."""
    model, hidden, read = fit.trunk(), fit.args.hidden_size, kind.layers
    last: Any = model.decoder.layers[-1]
    of_fc, of_residual = (Moments.zero(inputs, hidden) for inputs in (len(read) * hidden, 2 * hidden))
    embedded_H = torch.zeros(hidden, device="cuda")
    fc_HX = torch.zeros(hidden, len(read) * hidden, device="cuda")
    with progress_bar(desc="fit", total=len(fit.texts), unit="text", leave=False, disable=quiet) as bar:
        for number, tokens_S in enumerate([*fit.texts[::2], *fit.texts[1::2]]):
            seen = _seen(model, read, tokens_S)
            if number < len(fit.texts[::2]):
                of_fc.add_(Moments.of(seen.states_SX, seen.made_SH, seen.made_SH))
            else:
                if not fc_HX.any():
                    fc_HX = _solved(of_fc)
                feature_NH = (seen.states_SX @ fc_HX.T)[:-1]
                given_NX = torch.cat([_normalized(seen.embedded_SH[1:]), _normalized(feature_NH)], dim=-1)
                of_residual.add_(Moments.of(given_NX, seen.entered_SH[1:] - feature_NH, seen.entered_SH[1:]))
                embedded_H += _normalized(seen.embedded_SH).sum(0)
            bar.update()
    weights = {
        f"{DRAFTER}fc.weight": fc_HX,
        f"{DRAFTER}norm.weight": model.decoder.final_layernorm.weight,
        **{f"{LAYER}input_layernorm.{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm")},
        **dict(zip((QKV, PROJ), _attention(fit.args, kind.attention, of_residual, embedded_H, seed), strict=True)),
        **{f"{LAYER}{name}": last.get_parameter(name) for name in COPIED},
        **({} if drafted_N is None else {HEAD: attached_of(model).head().weight[drafted_N]}),
    }
    return {key: tensor.detach().float().cpu() for key, tensor in weights.items()}


def _attention(
    args: Namespace, sizes: AttentionSizes, sums: Moments, embedded_H: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Return linear_qkv [G (M + 2) C, 2 H] and linear_proj [H, G M C] of the best residual that attention can make."""
    hidden, groups, channels = args.hidden_size, sizes.groups, sizes.channels
    heads = sizes.heads // groups
    best_HX = _solved(sums).double()
    _, vectors_HH = torch.linalg.eigh(best_HX @ sums.uu @ best_HX.T)
    kept_HR = vectors_HH[:, -groups * channels :]
    value_RX = kept_HR.T @ best_HX
    larger = (value_RX.std() / kept_HR.std()).sqrt()  # equal size on both sides, since they share a learning rate
    value_GCX = (value_RX / larger).view(groups, channels, -1)
    drawn = RandomWeights.of(args, args.num_layers, seed)
    qkv, proj = (
        drawn.draw(QKV, ((heads + 2) * groups * channels, 2 * hidden)),
        drawn.draw(PROJ, (hidden, heads * groups * channels)),
    )
    assert qkv is not None
    assert proj is not None
    qkv_GMCX, proj_HGMC = qkv.view(groups, heads + 2, channels, -1), proj.view(hidden, groups, heads, channels)
    common_H = torch.nn.functional.normalize(embedded_H, dim=0).cpu()
    for group in range(groups):
        random_CH = normal_by_name(f"{seed}/{QKV}/{group}", channels, hidden)
        random_CH -= (random_CH @ common_H).unsqueeze(1) * common_H  # the shared direction would make all tokens alike
        key_CH = torch.linalg.qr(random_CH.T)[0].T * sqrt(SCORE / sqrt(channels))
        qkv_GMCX[group, [0, -2], :, :hidden], qkv_GMCX[group, [0, -2], :, hidden:] = key_CH, 0
        qkv_GMCX[group, -1] = value_GCX[group].float()
        proj_HGMC[:, group, 0] = (kept_HR * larger).view(hidden, groups, channels)[:, group].float()
    return qkv_GMCX.flatten(0, 2), proj_HGMC.flatten(1)


@dataclass(frozen=True)
class Seen:
    """States of a text in the trunk.

    Attributes:
        states_SX: states that a drafter reads.
        embedded_SH: the embedding.
        entered_SH: state between attention and MLP of the last layer.
        made_SH: output of the last layer.
    """

    states_SX: Tensor
    embedded_SH: Tensor
    entered_SH: Tensor
    made_SH: Tensor


def _seen(model: LanguageModule, read: tuple[int, ...], tokens_S: Tensor) -> Seen:
    entered, made, layers = list[Tensor](), list[Tensor](), model.decoder.layers
    hooks = [layers[-1].pre_mlp_layernorm.register_forward_pre_hook(lambda _, given: entered.append(given[0][:, 0]))]
    for number in (*read, len(layers)):
        hooks.append(layers[number - 1].register_forward_hook(lambda _, __, out: made.append(out[0][:, 0])))
    tokens_BS, positions_BS, _ = run_trunk(model, tokens_S)
    for hook in hooks:
        hook.remove()
    embedded_SH = model.embedding(input_ids=tokens_BS, position_ids=positions_BS)[:, 0]
    return Seen(torch.cat(made[:-1], dim=-1), embedded_SH, entered[0], made[-1])


def _normalized(values: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(values, values.shape[-1:], eps=1e-5)


def _solved(sums: Moments) -> Tensor:
    """[H, X], float32. The ridge of an input counts in its own size: the states after a trunk's layers grow."""
    added_XX = RIDGE * torch.diag(sums.uu.diagonal())
    return torch.linalg.solve(sums.uu + added_XX, sums.ux).T.float()
