"""Hugging Face format of an EAGLE drafter: `fc`, `layers.0.*`, a copy of the trunk's embedding."""

from typing import Any, ClassVar, override

from megatron_mtp.checkpoint.convert.drafter_codec import OneLayerCodec, TokenOrder, layer_rules
from megatron_mtp.checkpoint.families.blocks import Place
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.heads.eagle.row import ROW
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.spec.head import HeadSpec


class EagleFolder(OneLayerCodec):
    """EAGLE: one Llama layer without a norm before attention or before the output layer.

    SGLang identifies a folder by the first name of `architectures`, vLLM by the second.
    """

    has_embedding = True
    layer_names = ("layers.0.",)
    own_forms: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
    )

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        return super().keys(kind) | {"architectures": [ROW.architecture, ROW.published_as]}

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        hidden = sizes["hidden_size"]
        return [
            rename("fc.weight", f"{DRAFTER}fc.weight", (hidden, 2 * hidden)),
            *layer_rules(Place(layer, f"{DRAFTER}tf_layer."), sizes, kind, {}),
        ]

    @override
    def layers(self, keys: dict[str, Any], layers: int, count: str | None) -> list[int]:
        return []


FOLDER = EagleFolder()
