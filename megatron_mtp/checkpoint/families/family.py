"""What a family is: rules from a config, the forms that its folders come in, and whether Megatron can train it."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.hf.config import HFConfig

CARRIED = "carried."
"""Prefix of Megatron keys for tensors that Megatron has no module for, kept as they are: vision towers, say."""


@dataclass(frozen=True)
class Layout:
    """What a config leaves open, and the tensors of a folder decide.

    Attributes:
        depths: MTP depths that the folder holds.
        features: forms of the family that it uses, of those that `Family.features` names.
        carried: tensors that are kept as they are.
    """

    depths: int
    features: frozenset[str] = frozenset()
    carried: tuple[str, ...] = ()

    def has(self, feature: str) -> bool:
        return feature in self.features


@dataclass(frozen=True)
class Family:
    """One way in which published models name and arrange their tensors.

    Attributes:
        title: for people.
        rules: every tensor of a model, without those that are carried.
        depth_keys: config keys that count the depths, the first of them the one to be written.
        depth_default: depths where the config does not say; None where it does not have to, since names are counted.
        depth_pattern: a name that every depth has once, its index as the group.
        depth_limit: most depths that the family can hold; None for any.
        features: name of a form to the pattern of the tensors that show it.
        carried: patterns of tensors to keep as they are where no rule names them: vision towers, and trunk layers
            that Megatron cannot run.
        depth_of: the depth (from 0) that a carried tensor belongs to; None for those of the trunk.
        flags: Megatron's flags that build the model; None where Megatron cannot run it.
        untrainable: why Megatron cannot run the trunk; None where it can.
        depth_flags: Megatron's flags for a model with such depths, where it cannot run the trunk.
        depth_scales: what multiplies weights of a depth's layer in the model, by their names in Megatron.
        embedding_first: whether HF's projection has the embedding half first, as Megatron's does.
        defaults: values of keys that a config leaves out, as the family's class in transformers has them.
        input: 'post' where the trunk's hidden state after its final norm feeds the first depth, 'pre' before it.
    """

    title: str
    rules: Callable[[HFConfig, Layout], list[Rule]]
    depth_keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    depth_default: int | None = 0
    depth_pattern: str | None = None
    depth_limit: int | None = None
    features: Mapping[str, str] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    depth_of: Callable[[HFConfig, str], int | None] = lambda config, name: None
    flags: Callable[[HFConfig, Layout], list[str]] | None = None
    untrainable: str | None = None
    depth_flags: Callable[[HFConfig, Layout], list[str]] | None = None
    depth_scales: Callable[[HFConfig], dict[str, float]] = lambda config: {}
    embedding_first: bool = True
    input: str = "post"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def layout(self, config: HFConfig, names: Iterable[str]) -> Layout:
        """The layout of a folder with these tensors.

        Raises:
            ValueError: the config speaks of other depths than there are.
        """
        names = list(names)
        found = self._depths_found(config, names)
        said = self._depths_said(config)
        if said is not None and said != found:
            raise ValueError(
                f"{config.source} says '{self.depth_keys[0]}' {said}, but the folder holds the tensors of {found} "
                f"depth(s); put {found} there to convert what the folder holds."
            )
        if self.depth_limit is not None and found > self.depth_limit:
            raise ValueError(
                f"{config.source}: {self.title} holds at most {self.depth_limit} depth(s), not {found}; drop the "
                "others."
            )
        features = {name for name, pattern in self.features.items() if _any_matches(pattern, names)}
        layout = Layout(found, frozenset(features))
        return replace(layout, carried=tuple(sorted(self._carried(config, layout, names))))

    def all_rules(self, config: HFConfig, layout: Layout) -> list[Rule]:
        """Those of the text model, and those of the tensors that are carried along."""
        return self.rules(config, layout) + [rename(name, f"{CARRIED}{name}", None) for name in layout.carried]

    def _carried(self, config: HFConfig, layout: Layout, names: list[str]) -> list[str]:
        if not self.carried:
            return []
        ruled = {tensor.name for rule in self.rules(config, layout) for tensor in rule.hf}
        pattern = re.compile("|".join(self.carried))
        return [name for name in names if name not in ruled and pattern.match(name)]

    def _depths_said(self, config: HFConfig) -> int | None:
        if self.depth_pattern is None:
            return 0
        if not any(config.has(key) for key in self.depth_keys):
            return None
        return config.integer(*self.depth_keys, least=0)

    def _depths_found(self, config: HFConfig, names: list[str]) -> int:
        if self.depth_pattern is None:
            return 0
        pattern = re.compile(self.depth_pattern)
        return len({match.group(1) for name in names if (match := pattern.search(name))})


def numbered_depth(pattern: str) -> Callable[[HFConfig, str], int | None]:
    """`Family.depth_of` where names that match have the depth's index as the group."""
    compiled = re.compile(pattern)

    def depth_of(config: HFConfig, name: str) -> int | None:
        match = compiled.match(name)
        return None if match is None else int(match.group(1))

    return depth_of


def _any_matches(pattern: str, names: list[str]) -> bool:
    compiled = re.compile(pattern)
    return any(compiled.search(name) for name in names)
