"""Hugging Face format of an EAGLE-3 drafter: `midlayer.*`, `fc`, `norm`, `lm_head`; for a draft vocabulary d2t, t2d."""

from typing import Any, ClassVar, override

from megatron_mtp.checkpoint.convert.drafter_codec import (
    AUX_LAYERS,
    COUNTS,
    OF_ONE_LAYER,
    OneLayerCodec,
    TokenOrder,
    input_and_output,
    layer_rules,
)
from megatron_mtp.checkpoint.families.blocks import Place
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.heads.eagle3.row import READS, engine_layers
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.spec.head import HeadSpec

NORMS_OF_BOTH = {"input_layernorm": "input_layernorm.enorm", "hidden_norm": "input_layernorm.hnorm"}
"""Names of the norms of the attention's two inputs, an embedding and a feature, with their names in this package."""


class Eagle3Folder(OneLayerCodec):
    """EAGLE-3, which always has its own output layer."""

    has_own_head = True
    own_forms: ClassVar[dict[str, Any]] = {"num_aux_hidden_states": READS}

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        returns = [number - 1 for number in kind.layers]
        own = {AUX_LAYERS: [*kind.layers], OF_ONE_LAYER: {AUX_LAYERS: returns, "use_aux_hidden_state": True}}
        return super().keys(kind) | own

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        return [
            *input_and_output(sizes, len(kind.layers)),
            *layer_rules(Place(layer, f"{DRAFTER}tf_layer."), sizes, kind, NORMS_OF_BOTH, inputs=2),
        ]

    @override
    def layers(self, keys: dict[str, Any], layers: int, count: str | None) -> list[int]:
        inner = (keys.get(OF_ONE_LAYER) or {}).get(AUX_LAYERS)
        if inner and count is None and inner in (keys.get(AUX_LAYERS), [*engine_layers(layers)]):
            raise ValueError(
                f"has {AUX_LAYERS} {' '.join(map(str, inner))} within {OF_ONE_LAYER}, where numbers count the outputs "
                "of layers from 0, and these look like states after so many layers; choose with "
                "--drafter-layer-ids-count outputs or states, by the acceptance."
            )
        found = super().layers(keys, layers, count)
        if not found and inner:
            return [number + COUNTS[count or "outputs"] for number in inner]
        return found or [*engine_layers(layers)]


FOLDER = Eagle3Folder()
