"""Families with draft modules whose folders do not convert: contents of the folders, for audits and error messages.

They cannot be trained here, so they have no rules. The descriptions suffice to count the MTP layers, to find missing
ones, and to explain how the parts belong together. Sources: the classes of transformers, vLLM and SGLang.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
AFTER, BEFORE = "after", "before"


@dataclass(frozen=True)
class Described:
    """How the folders of a family store their MTP layers.

    Attributes:
        title: the family's name.
        model_types: values of `model_type`.
        reason: why it does not convert.
        at: pattern of the start of a depth's tensor names, searched for in their names. Its group `k` is the depth's
            number, its group `n` that of a layer, counted on from the trunk's; without either it is depth 0. None if
            the folder has no MTP layers.
        frame: modules around a depth's layer, without which it drafts nothing; one with a leading dot is not
            under the depth's prefix.
        keys: config keys that hold the number of MTP layers.
        default: number of MTP layers where the config has none of the keys; None if the tensors decide.
        limit: most MTP layers that a count means; None for no limit.
        halves: which half of the projection is first.
        fed: what feeds the first depth, and each later one: the hidden state before or after the final norm.
        published: MTP layers of published folders whose config counts none.
    """

    title: str
    model_types: tuple[str, ...]
    reason: str
    at: str | None = r"\blayers\.(?P<n>\d+)\."
    frame: tuple[str, ...] = DEEPSEEK
    keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    default: int | None = None
    limit: int | None = None
    halves: str = "embedding half first"
    fed: tuple[str, str] = (AFTER, AFTER)
    published: int = field(default=0)

    def depths(self, names: Iterable[str], layers: int | None) -> dict[int, list[str]]:
        """Return the tensors of every MTP layer, after this many trunk layers."""
        found: dict[int, list[str]] = defaultdict(list)
        for name in names:
            if self.at is not None and (match := re.search(self.at, name)):
                numbers = match.groupdict()
                layer = int(numbers.get("n") or layers or 0)
                if layer >= (layers or 0):
                    found[int(numbers.get("k") or 0) + layer - (layers or 0)].append(name)
        return dict(sorted(found.items()))

    def lost(self, names: Iterable[str], layers: int | None) -> list[str]:
        """Return names of weights that the MTP layers lack around their layers."""
        held = {*names}
        lost = []
        for own in self.depths(held, layers).values():
            match = re.search(self.at or "", own[0])
            prefix = own[0][: match.end()] if match else ""
            wanted = [(part[1:] if part[0] == "." else prefix + part) + ".weight" for part in self.frame]
            lost += [name for name in wanted if name not in held]
        return lost


def _numbered(title: str, types: str, reason: str, frame: tuple[str, ...] = DEEPSEEK, **others: object) -> Described:
    """Create a family with DeepSeek's names."""
    return Described(title, tuple(types.split()), reason, frame=frame, **others)  # type: ignore[arg-type]


_OWN_NORM = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_UNDER_MTP, _ONE = r"(?:^|\.)mtp\.layers\.(?P<k>\d+)\.", r"^mtp\.(?:layers\.(?P<k>\d+)\.)?"
_UNKNOWN = "transformers ignores 'mtp.*' of this family, and no public code documents it"

DESCRIBED: tuple[Described, ...] = (
    _numbered(
        "GLM-5.3-Flash", "glm5_next glm5_next_text",
        "a trunk of Kimi's delta attention, and MTP layers of latent attention with a pooled indexer",
    ),
    Described(
        "Hy4", ("hy_v4", "hy_v4_text", "hy_v4_vl"), "hyper-connections, sparse attention and attention sinks",
        at=r"\b(?:mtp_layers\.(?P<k>\d+)|layers\.(?P<n>\d+))\.", frame=_OWN_NORM, limit=1,
    ),
    _numbered("Ling 2.5", "bailing_hybrid", "lightning attention", _OWN_NORM),
    _numbered("Ling 3", "bailing_moe_v3", "Kimi's delta attention", _OWN_NORM),
    _numbered("Kimi-K3", "kimi_k3 kimi_k3_text", "Kimi's delta attention"),
    _numbered(
        "dots.3 note", "dots3_note dots3_note_text", "a sparse indexer of keys, and sliding windows",
        (*DEEPSEEK, ".model.mtp.embed_tokens"),
    ),
    _numbered("Pangu Ultra MoE", "pangu_ultra_moe", "norms after attention and MLP together with latent attention"),
    Described(
        "Qwen4, experimental", ("qwen4_exp", "qwen4_exp_text"), "several residual streams (hyper-connections)",
        at=_ONE,
        frame=(
            ".mtp.pre_fc_norm_embedding", ".mtp.pre_fc_norm_hidden", ".mtp.fc_embedding", ".mtp.fc_hidden", ".mtp.norm",
        ),
        keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        halves="two projections, one of the embedding and one of the hidden state",
    ),
    Described(
        "Intern-S2 Mobius", ("interns2_mobius",), "banks of experts that layers share",
        at=_ONE, frame=(".mtp.pre_fc_norm_embedding", ".mtp.pre_fc_norm_hidden", ".mtp.fc", ".mtp.norm"),
        keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    ),
    Described("Granite-Docling", ("granite_docling",), _UNKNOWN, at=_ONE, frame=()),
    Described("OLMo, hybrid", ("olmo_hybrid",), _UNKNOWN, at=_ONE, frame=()),
    Described(
        "MiniMax-M3", ("minimax_m3_vl", "minimax_m3_mtp"), "sparse attention by blocks of keys",
        at=_UNDER_MTP, frame=_OWN_NORM, keys=("num_mtp_modules", "num_nextn_predict_layers"), fed=(AFTER, BEFORE),
    ),
    Described(
        "Inkling", ("inkling_mm_model", "inkling", "inkling_model"), "learned position biases and short convolutions",
        at=_UNDER_MTP, frame=("embed_norm", "hidden_norm", "input_proj"),
        keys=("num_mtp_layers", "num_nextn_predict_layers"), halves="hidden half first",
    ),
    Described(
        "DeepSeek-V4", ("deepseek_v4", "deepseek_v41", "deepseek_v41_text"),
        "compressed sparse attention, and several residual streams (hyper-connections)",
        at=r"^mtp\.(?P<k>\d+)\.", frame=("enorm", "hnorm", "e_proj", "h_proj", "norm"),
        halves="two projections, one of the embedding and one of the hidden state",
    ),
    Described("Mistral Large 4", ("mistral_large4",), "its drafter and trunk are unknown to Megatron", at=None),
    Described(
        "Gemma 4, assistant", ("gemma4_assistant", "gemma4_unified_assistant", "muse_glimmer_assistant"),
        "it is a drafter separate from its trunk, and all of its layers make one draft", at=None,
    ),
)  # fmt: skip
"""Rows by their first `model_type`."""


def described(*model_types: str | None) -> Described | None:
    """Return the first of these types that is described; None if none is."""
    rows = {model_type: row for row in DESCRIBED for model_type in row.model_types}
    return next((rows[one] for one in model_types if one in rows), None)
