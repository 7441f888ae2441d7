"""Facts of a family: names, rules, MTP layers, defaults, and support by Megatron and engines.

In:  a `config.json` and the names of a folder's tensors.
Out: a `Layout` (what the tensors determine) and the rules between both sides.

Everything that other code needs to know about a family is a field here. The verification of conversions
(`checkpoint/verify/reference_forms.py`) deliberately has its own description of each family, so that a fault in a rule
is not in both.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.families.inside import InnerDrafter
from megatron_mtp.checkpoint.families.naming import misnamed, unwrapped
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.families.trained import TrainedForm
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig, read_json

CARRIED = "carried."
"""Prefix of Megatron keys for tensors that Megatron has no module for, such as vision towers."""
TRUNK_ALONE = "megatron-mtp convert hf-to-mcore --trunk-only"
OF_A_HEAD = re.compile(r"(^|\.)mtp(_\w+)?\.")
"""Name patterns common to published MTP layers and other draft modules."""
STORED_HEAD = {"head": r"(^|\.)lm_head\.weight$"}
"""Most folders do not store a tied output layer, but some do."""
COPIES = {
    "embedding copies": r"layers\.\d+\.embed_tokens\.weight$",
    "head copies": r"layers\.\d+\.shared_head\.head\.weight$",
}
"""DeepSeek's folders repeat embedding and output layer in every MTP layer; other folders do not."""
PACKED = {"packed experts": r"mlp\.experts\.gate_up_proj$"}
NESTED = {"nested": r"^language_model\.model\."}
"""Kimi-K2.5 stores the text model next to a vision tower."""


class UntrainableError(ValueError):
    """Megatron supports the family but not this model; the message gives the reason."""


@dataclass(frozen=True)
class Layout:
    """Facts that a config does not determine but the tensors of a folder do.

    Attributes:
        depths: number of MTP layers in the folder.
        features: names of the forms that the folder uses, out of `Family.features`.
        carried: names of the tensors that are stored unchanged, because no rule covers them.
    """

    depths: int
    features: frozenset[str] = frozenset()
    carried: tuple[str, ...] = ()

    def has(self, feature: str) -> bool:
        """Return whether the folder uses this form."""
        return feature in self.features


@dataclass(frozen=True)
class Depths:
    """Storage of MTP layers in a family's folders.

    Attributes:
        pattern: matches one tensor name per depth; its group is the depth's index.
        prefix: HF's prefix of a depth: {k} is its index, {n} that of a layer counted on from the trunk's, {model} the
            trunk's prefix.
        names: HF's modules around the layer: norms of embedding and hidden state, projection, and the norm before the
            head, None without one. A name with a leading dot is not under the prefix.
        keys: config keys that hold the number of MTP layers; an export writes the first.
        default: number of MTP layers where the config has none of the keys; None if the tensors alone decide.
        published: number of MTP layers that published folders hold without a key that counts them; 0 if one does.
        layers_key: config key that holds the layers of a depth by Megatron's symbols; None if all MTP layers are alike.
        limit: largest number of MTP layers that a folder can hold; None for any.
        carried: matches the start of a carried tensor's name if it is a depth's; the group is the depth's index, 0
            if it is empty, counted on from the trunk's layers where the prefix has {n}. None if no depth is carried.
        inner: prefixes of names inside a carried depth's layer, and those of the same weights in the trunk's
            layers; empty where they are the same.
        embedding_first: whether the projection in the folder has the embedding half first, as Megatron's has.
        before_norm: whether the trunk's hidden state enters the first depth before the final norm, not after it.
        served: prefixes of module names under the prefix, and of vLLM's names if they differ, by which it
            reads lists of unquantized modules; the first that fits counts.
        never_quantized: matches a module of a depth that engines never quantize, whatever is listed; None if none.
    """

    pattern: str = r"\.layers\.(\d+)\.eh_proj\.weight$"
    prefix: str = "{model}layers.{n}."
    names: tuple[str, str, str, str | None] = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    default: int | None = 0
    published: int = 0
    layers_key: str | None = None
    limit: int | None = None
    carried: str | None = None
    inner: Mapping[str, str] = field(default_factory=dict)
    embedding_first: bool = True
    before_norm: bool = False
    served: Mapping[str, str] = field(default_factory=dict)
    never_quantized: str | None = None

    @property
    def halves(self) -> str:
        """Which half of the projection is first in the folder."""
        return f"{'embedding' if self.embedding_first else 'hidden'} half first"

    @property
    def fed(self) -> tuple[str, str]:
        """Whether the first and the later MTP layers get the hidden state before or after the final norm."""
        side = "before" if self.before_norm else "after"
        return side, side

    def configured(self, config: HFConfig) -> int | None:
        """Return the number of MTP layers in the config; None if no key has one."""
        return config.integer(*self.keys, least=0) if any(config.has(key) for key in self.keys) else None

    def depth_of(self, config: HFConfig, name: str) -> int | None:
        """Return the depth (from 0) of a carried tensor; None for one of the trunk."""
        match = None if self.carried is None else re.match(self.carried, name)
        if match is None:
            return None
        depth = int(match.group(1) or 0) - (config.integer("num_hidden_layers") if "{n}" in self.prefix else 0)
        return depth if depth >= 0 else None

    def by_depth(self, config: HFConfig, names: Iterable[str]) -> dict[int, list[str]]:
        """Return the carried tensors of each MTP layer, its frame included, by index."""
        found: dict[int, list[str]] = {}
        for name in names:
            if (depth := self.depth_of(config, name)) is not None:
                found.setdefault(depth, []).append(name)
        return dict(sorted(found.items()))

    def is_never_quantized(self, module: str) -> bool:
        """Return whether engines never quantize this module."""
        return self.never_quantized is not None and re.fullmatch(self.never_quantized, module) is not None

    def in_vllm(self, config: HFConfig, depths: int, module: str) -> str:
        """Return vLLM's name of a module, given the number of MTP layers: usually the folder's own."""
        if not self.served:
            return module
        # vLLM counts a LongCat layer, which has two attentions, as two layers
        first = 2 * config.integer("num_layers") if config.has("num_layers") else config.integer("num_hidden_layers")
        for k in range(depths):
            own = self.prefix.format(k=k, n=first + k, model="model.")
            for ours, theirs in self.served.items():
                if module.startswith(own + ours):
                    return theirs.format(n=first + k) + module.removeprefix(own + ours)
        return module

    def stored(self, names: Iterable[str]) -> int:
        """Return the number of MTP layers among these tensor names."""
        pattern = re.compile(self.pattern)
        return len({match.group(1) for name in names if (match := pattern.search(name))})


EITHER_COUNT = ("num_nextn_predict_layers", "num_mtp_layers")
"""Config keys for the number of MTP layers if transformers' class has an alias for DeepSeek's key."""
ONE_DEPTH = Depths(
    r"^mtp\.(fc)\.weight$",
    "mtp.layers.0.",
    (".mtp.pre_fc_norm_embedding", ".mtp.pre_fc_norm_hidden", ".mtp.fc", ".mtp.norm"),
    default=None,
    limit=1,
)
"""The single MTP layer of Qwen's models, and of EXAONE's."""
ATTACHED = Depths(
    r"^mtp\.layers\.(\d+)\.eh_proj\.weight$", "mtp.layers.{k}.", ("enorm", "hnorm", "eh_proj", "final_layernorm")
)
"""MTP layers that `attach-mtp` added to a larger model whose text model's family has no names for them: each is a layer
like the trunk's. transformers ignores these tensors, and they convert back.
"""


@dataclass(frozen=True)
class Family:
    """How a group of published models names and arranges its tensors.

    Attributes:
        title: the family's name in messages and tables.
        published: published models of the family, for the table in docs/reference/families.md.
        model_types: values of `model_type` in `config.json`; the first is the one that an export writes.
        rules: rules for every tensor of a model except the carried ones.
        defaults: values of keys that a config may leave out, where the class in transformers does not state them.
        config_class: `model_type` of the class in transformers that has the defaults; None for the first of
            `model_types`.
        features: name of a form to the pattern of the tensors that show it.
        carried: patterns of tensors to store unchanged if no rule names them: vision towers, and trunk layers that
            Megatron cannot run.
        depths: how the folders store MTP layers; None if they cannot.
        attached: the rules with MTP layers in the form of `ATTACHED`; None if folders have their own, or no rule.
        flags: Megatron's flags that build the model; None if Megatron cannot run the trunk.
        untrainable: why Megatron cannot run the trunk; None if it can.
        trained: the form that a model trained by Megatron takes in this family; None if there is none.

    Raises:
        ValueError: both or neither of `flags` and `untrainable` are given, or there is no `model_type`.
    """

    title: str
    published: str
    model_types: tuple[str, ...]
    rules: Callable[[HFConfig, Layout], list[Rule]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    config_class: str | None = None
    features: Mapping[str, str] = field(default_factory=lambda: STORED_HEAD)
    carried: tuple[str, ...] = ()
    depths: Depths | None = None
    attached: Callable[[HFConfig, Layout], list[Rule]] | None = None
    flags: Callable[[HFConfig, Layout], list[str]] | None = None
    untrainable: str | None = None
    trained: TrainedForm | None = None

    def __post_init__(self) -> None:
        if (self.flags is None) == (self.untrainable is None):
            raise ValueError(f"the family {self.title} needs either Megatron's flags or the reason why it lacks them.")
        if not self.model_types:
            raise ValueError(f"the family {self.title} names no model_type; give one or more.")

    def complete(self, config: HFConfig) -> HFConfig:
        """Fill in missing config keys: the family's values, then those of the class."""
        return config.with_defaults({**class_defaults(self.config_class or self.model_types[0]), **self.defaults})

    def layout(self, config: HFConfig, names: Iterable[str]) -> Layout:
        """Return the layout of a folder with these tensor names.

        Raises:
            ValueError: the config specifies a different number of MTP layers than the folder has or the family
                supports.
        """
        names = list(names)
        features = {name for name, pattern in self.features.items() if _any_matches(pattern, names)}
        inner = InnerDrafter.of(config.keys, names)
        layout = Layout(self._stored_depths(config, names, inner), frozenset(features))
        drafter = frozenset() if inner is None else inner.names
        return replace(layout, carried=tuple(sorted({*self._carried(config, layout, names)} | drafter)))

    def all_rules(self, config: HFConfig, layout: Layout) -> list[Rule]:
        """Return rules for all tensors: those of the text model, and the carried ones."""
        return self.rules(config, layout) + [rename(name, f"{CARRIED}{name}", None) for name in layout.carried]

    def misnamed(self, config: HFConfig, names: Iterable[str]) -> dict[str, str]:
        """Return tensors with names that other software does not look for, each with the correct name (`naming.py`).

        MTP layers are looked for even if the config counts none. ValueError where the rules do not fit the config.
        """
        names = {*names}
        return misnamed(names, self._named(config, [unwrapped(name) for name in names], with_depths=True))

    def of_depths(self, config: HFConfig, names: Iterable[str]) -> frozenset[str]:
        """Return the tensors of MTP layers among these names, whether complete, incomplete or of unknown form."""
        names = {*names}
        of_trunk, all_named = (self._named(config, names, with_depths) for with_depths in (False, True))
        found = names & all_named | {name for name in names if OF_A_HEAD.search(name)}
        if self.depths is not None:
            found |= {name for name in names if self.depths.depth_of(config, name) is not None}
        return frozenset(found - of_trunk)

    def _named(self, config: HFConfig, names: Collection[str], with_depths: bool) -> set[str]:
        """Return tensor names that the rules give in the form of `names`, for the largest number of MTP layers."""
        features = {name for name, pattern in self.features.items() if _any_matches(pattern, names)}
        most = 0
        if self.depths is not None and with_depths:
            most = max(self.depths.configured(config) or 0, self.depths.stored(names), self.depths.published, 1)
        return {tensor.name for rule in self.rules(config, Layout(most, frozenset(features))) for tensor in rule.hf}

    def _stored_depths(self, config: HFConfig, names: list[str], inner: InnerDrafter | None) -> int:
        if self.depths is None:
            return 0
        stored, configured = self.depths.stored(names), self.depths.configured(config)
        if configured not in (None, stored) and inner is None:  # with an inner drafter, the key counts its stages
            held = f"the tensors of {stored} depth(s)" if stored else "no tensor of an MTP layer"
            remedy = f'put "{self.depths.keys[0]}": {stored} there, since engines load no depth that is not counted'
            if stored < (configured or 0):
                remedy = (
                    "fetch or export the folder again, or put the MTP layers of the model that it was made from on its "
                    f"trunk (megatron-mtp convert graft), or convert the trunk alone ({TRUNK_ALONE})"
                )
            raise ValueError(
                f"{config.source} has '{self.depths.keys[0]}' {configured}, but the folder holds {held}; {remedy}."
            )
        if self.depths.limit is not None and stored > self.depths.limit:
            raise ValueError(
                f"{config.source}: {self.title} holds at most {self.depths.limit} depth(s), not {stored}; correct the "
                "model_type, or fetch the folder again."
            )
        return stored

    def _carried(self, config: HFConfig, layout: Layout, names: list[str]) -> list[str]:
        if not self.carried:
            return []
        ruled = {tensor.name for rule in self.rules(config, layout) for tensor in rule.hf}
        pattern = re.compile("|".join(self.carried))
        return [name for name in names if name not in ruled and pattern.match(name)]


DEFAULTS = (
    "attention_bias attention_multiplier conv_kernel embedding_multiplier first_k_dense_replace head_dim hidden_act "
    "layer_norm_eps layer_norm_epsilon linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads "
    "linear_num_value_heads linear_value_head_dim logits_scaling mamba_head_dim mamba_hidden_act mamba_num_heads "
    "max_position_embeddings mlp_bias mlp_hidden_act moe_shared_expert_intermediate_size n_group n_groups "
    "n_shared_experts norm_eps norm_topk_prob num_key_value_heads num_shared_experts original_max_position_embeddings "
    "q_lora_rank qkv_bias residual_multiplier rms_norm_eps rope_interleave routed_scaling_factor router_scaling_factor "
    "sliding_window ssm_state_size swiglu_alpha swiglu_limit tie_word_embeddings time_step_limit topk_group "
    "use_conv_bias use_qk_norm"
).split()
"""Keys with the class's default; sizes that distinguish models are not among them and must be in a config."""


@cache
def class_defaults(model_type: str) -> Mapping[str, Any]:
    """Return a transformers class's defaults for missing keys; empty if there is no such class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return {}
    kind = CONFIG_MAPPING[model_type]
    found = {name: getattr(kind, name, None) for name in DEFAULTS}
    return {name: value for name, value in found.items() if value is not None} | {"rope_theta": kind.default_theta}


def class_tensors(folder: Path) -> dict[str, Shape]:
    """Return names and shapes of what transformers' class for a folder would save; empty if there is no class.

    Trunks that Megatron cannot run are carried by name, and no rule determines which tensors they have; their class
    does. LongCat's identity experts have no tensors in published folders, although the class reserves rows.

    Args:
        folder: folder with a `config.json`; its tensors are not read, and none of its code is run.
    """
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    try:
        config = _class_config(folder)
        around = TEXT_INSIDE.get(config.model_type)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if around is not None:
                whole = transformers.AutoConfig.for_model(around, text_config=config.to_dict())
                whole.vision_config.num_hidden_layers = 1  # the vision tensors are discarded below
                model = transformers.AutoModelForImageTextToText.from_config(whole)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
        state = model.state_dict()
        if around is not None:
            state = {name: one for name, one in state.items() if _OF_TEXT.match(name)}
        found = revert_weight_conversion(model, state)
    except Exception:  # transformers raises many types for an unknown config
        return {}
    count = config.n_routed_experts if getattr(config, "zero_expert_num", None) else sys.maxsize
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    return {n: shape for n, shape in shapes.items() if not ((m := _EXPERT.search(n)) and int(m.group(1)) >= count)}


TEXT_INSIDE = {"step3p5": "step3p7"}
"""Text models for which transformers has a class only as the text part of another type."""
_OF_TEXT = re.compile(r"(model\.language_model|lm_head)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def class_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of a folder's config with the defaults of transformers' class, or only those of the file."""
    try:
        keys: dict[str, Any] = _class_config(folder).to_dict()
    except Exception:  # transformers raises many types for an unknown config
        return dict(read_json(folder / CONFIG))
    return keys


def _class_config(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.__dict__.pop("quantization_config", None)
    return config


NAMES_ALONE = (
    "architectures auto_map dtype torch_dtype transformers_version _name_or_path quantization_config use_cache "
    "initializer_range attention_dropout bos_token_id eos_token_id pad_token_id id2label label2id output_attentions "
    "output_hidden_states return_dict output_router_logits router_aux_loss_coef vision_config compression_config "
    "pretraining_tp"
).split()
"""Keys that do not change the logits of text."""


def computing(keys: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the config keys that may change the logits of text, nested ones as `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in keys.items():
        if name in NAMES_ALONE:
            continue
        found |= computing(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _any_matches(pattern: str, names: Iterable[str]) -> bool:
    compiled = re.compile(pattern)
    return any(compiled.search(name) for name in names)
