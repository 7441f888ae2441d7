"""How engines feed the MTP layers of an exported model: one table, with the source of every rule.

A draft is made from a hidden state and the embedding of the newest token. In training, draft d is made by depth d, from
the state of depth d - 1 after its final norm, and depth d attends to its own rows at all earlier positions. An engine
that does something else still generates correct output, because it verifies; it accepts fewer drafts.

    feeding = ENGINES["vllm"].feeding("glm4_moe", depths=2)
    differences(TRAINED, feeding)          the rules that differ, described for both sides

Every engine that runs drafters (EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark) feeds them like our own decoder; for these,
the table has only the source and the evidence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

READ = "read in its source"
EVERY_DEPTH = "every draft by its own depth"
FIRST_DEPTH = "every draft by depth 1"


@dataclass(frozen=True)
class Feeding:
    """Inputs of drafts. The defaults are those of training.

    Attributes:
        module: which depth makes draft d: "own" (depth d) or "first" (depth 1).
        trunk: the state that the first draft continues from is the trunk's "after" or "before" its final norm.
        chained: the state that later drafts continue from is a depth's "after" or "before" its final norm.
        zeroed: whether the embedding at position 0 counts as zero.
        keys: what a draft attends to. "own": the rows of the depth that makes it, made as in training. "chain": rows
            made with the trunk's states, and the earlier drafts of the round, each one position further. "window": the
            same with every row's trunk state and token d - 1 positions later. "first": rows made with the trunk's
            states alone. "none": itself alone.
        first_row: whether a row with a zero state and token 0 precedes all others.
        swapped: whether the halves of eh_proj are exchanged; no engine does that, but folders can be wrong.
    """

    module: str = "own"
    trunk: str = "after"
    chained: str = "after"
    zeroed: bool = False
    keys: str = "own"
    first_row: bool = False
    swapped: bool = False


TRAINED = Feeding()
SHARED_KEYS = Feeding(module="first", keys="chain")
"""Rule of training with --mtp-repeated-layer-shares-kv."""
FIRST_PASS_KEYS = Feeding(module="first", keys="first")
"""Rule of training with --mtp-repeated-layer-first-pass-kv."""

WORDS: dict[tuple[str, object], str] = {
    ("module", "own"): EVERY_DEPTH,
    ("module", "first"): FIRST_DEPTH,
    ("trunk", "after"): "draft 1 continues from the trunk's state after the final norm",
    ("trunk", "before"): "draft 1 continues from the trunk's state before the final norm",
    ("chained", "after"): "later drafts continue from the depth's state after its final norm",
    ("chained", "before"): "later drafts continue from the depth's state before its final norm",
    ("zeroed", False): "the embedding at position 0 is used",
    ("zeroed", True): "the embedding at position 0 is replaced by zeros",
    ("keys", "own"): "a draft attends to what its depth has seen at all earlier positions",
    ("keys", "chain"): "a draft attends to depth 1's rows of the known tokens and to the drafts before it",
    ("keys", "window"): "a depth's earlier rows are made with the trunk's states",
    ("keys", "first"): "a draft attends to depth 1's rows of the known tokens alone",
    ("keys", "none"): "a draft attends to itself alone",
    ("first_row", False): "the first row is that of token 1",
    ("first_row", True): "a row of a zero state and token 0 stands before all others",
    ("swapped", False): "eh_proj has the embedding half where the family's class expects it",
    ("swapped", True): "the halves of eh_proj are exchanged",
}
"""Description of a rule, by its name and value."""


@dataclass(frozen=True)
class FamilyRules:
    """Rules of an engine's class of one family.

    Attributes:
        source: the file of the class in the engine's repository.
        embedding_first: whether the class expects the embedding's half of eh_proj before the hidden state's.
        limit: how many MTP layers a folder may have; None for any.
        layers: symbols of --hybrid-layer-pattern that an MTP layer may consist of; None where it is not a stack.
        evidence: as in `Engine`; None for that of the engine.
        trunk, chained, zeroed: as in `Feeding`.
    """

    source: str
    embedding_first: bool = True
    limit: int | None = None
    layers: str | None = None
    evidence: str | None = None
    trunk: str = "after"
    chained: str = "after"
    zeroed: bool = False


@dataclass(frozen=True)
class DrafterRules:
    """An engine's class of one kind of drafters.

    Attributes:
        source: the file of the class in the engine's repository.
        evidence: whether the engine's own counts were compared with those of our decoder.
        latent_source: the file of its class with latent attention; None if it has none.
        method: keys of its speculative config that choose it; None where the method has the kind's name.
    """

    source: str
    evidence: str = READ
    latent_source: str | None = None
    method: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        title: its name and the version whose rules these are.
        repository: where its sources are.
        source: the file that makes the drafts, in its repository.
        families: rules by `model_type`.
        evidence: whether the counts of the engine itself were compared with these rules.
        drafters: what it runs of drafters, by kind (`spec.kinds.DRAFTERS`).
        module, keys, first_row: as in `Feeding`.
        counts: which numbers of drafts it takes: "any", "depths" (as many as depths), "multiple" (at most as many as
            depths, or a multiple of them), "known" (where there are several depths, the rules are known for at most as
            many).
        accepts: its rule for accepting drafts, where texts are greedy.
        several: its rules where a folder has more than one depth, from those for one.
    """

    title: str
    repository: str
    source: str
    families: Mapping[str, FamilyRules]
    evidence: str
    drafters: Mapping[str, DrafterRules] = field(default_factory=dict)
    module: str = "first"
    keys: str = "chain"
    first_row: bool = False
    counts: str = "any"
    accepts: str = "a draft is accepted if it is the trunk's likeliest token, and all drafts before it are accepted"
    several: Callable[[Feeding], Feeding] = lambda feeding: feeding

    def feeding(self, family: str, depths: int) -> Feeding:
        """Return how the drafts of a folder of this family with this many MTP layers are fed.

        Raises:
            ValueError: the table has no rules of the engine for this family.
        """
        if family not in self.families:
            raise ValueError(
                f"predict has no rules of {self.title} for the family '{family}', whatever the engine itself runs; it "
                f"has them for {', '.join(self.families)} (--family chooses the form of a checkpoint's export)."
            )
        rules = self.families[family]
        feeding = Feeding(
            module=self.module,
            trunk=rules.trunk,
            chained=rules.chained,
            zeroed=rules.zeroed,
            keys=self.keys,
            first_row=self.first_row,
        )
        return self.several(feeding) if depths > 1 else feeding

    def check_layers(self, family: str, layers: str) -> None:
        """Raise ValueError for an MTP layer that the engine does not build, by symbols of --hybrid-layer-pattern."""
        allowed = self.families[family].layers
        if allowed is not None and not set(layers) <= set(allowed):
            raise ValueError(
                f"the MTP layers are stacks {layers}, and {self.title} builds those of '{family}' from {allowed} alone "
                "(* attention, E experts); serve the checkpoint with megatron-mtp serve."
            )

    def drafter(self, kind: str, is_latent: bool = False) -> DrafterRules:
        """Return the engine's class for a kind of drafter, with latent attention or without.

        Raises:
            ValueError: the engine has no such class in the table.
        """
        if kind not in self.drafters:
            known = ", ".join(self.drafters) or "no kind of drafters"
            raise ValueError(f"predict has no rules of {self.title} for the drafter '{kind}'; it has them for {known}.")
        rules = self.drafters[kind]
        if not is_latent:
            return rules
        if rules.latent_source is None:
            raise ValueError(
                f"predict has no rules of {self.title} for the drafter '{kind}' with latent attention; it has them "
                "for grouped queries (train --drafter without --drafter-multi-latent-attention)."
            )
        return DrafterRules(rules.latent_source)

    def evidence_of(self, family: str) -> str:
        """Return whether the engine's counts were compared with these rules of a family."""
        return self.families[family].evidence or self.evidence

    def source_of(self, rule: str, family: str) -> str:
        """Return the file, in the engine's repository, in which a rule of `Feeding` can be read."""
        in_class = rule in {row.name for row in fields(FamilyRules)}
        return f"{self.repository}: {self.families[family].source if in_class else self.source}"

    def check_count(self, count: int, depths: int) -> None:
        """Raise ValueError for a number of drafts that the engine does not accept."""
        if self.counts == "depths" and count != depths:
            raise ValueError(
                f"--num-speculative-tokens is {count}, but {self.title} drafts with all MTP layers of the folder, here "
                f"{depths}; leave it out, or give a copy with {count} (convert drop-mtp --keep {count})."
            )
        if self.counts == "known" and count > depths > 1:
            raise ValueError(
                f"--num-speculative-tokens is {count}, and what {self.title} does beyond the MTP layers of a folder, "
                f"here {depths}, is not in the table; give at most {depths}."
            )
        if self.counts == "multiple" and count > depths and count % depths:
            raise ValueError(
                f"--num-speculative-tokens is {count}, but {self.title} takes at most the number of MTP layers, here "
                f"{depths}, or a multiple of it; give such a number."
            )


_VLLM_MODELS = "vllm/model_executor/models"
_SGLANG_MODELS = "python/sglang/srt/models"
_TENSORRT_MODELS = "tensorrt_llm/_torch/models"
_VLLM_RUN = "run: tests/extensions/predict/test_vllm.py"
_LLAMA_RUN = "run: tests/functional/test_drafters_in_llama_cpp.py"

_VLLM_FAMILIES = {
    "glm4_moe": FamilyRules(f"{_VLLM_MODELS}/glm4_moe_mtp.py", chained="before", zeroed=True),
    "glm4_moe_lite": FamilyRules(f"{_VLLM_MODELS}/glm4_moe_lite_mtp.py", chained="before", zeroed=True),
    "deepseek_v3": FamilyRules(f"{_VLLM_MODELS}/deepseek_mtp.py", zeroed=True),
    "hy_v3": FamilyRules(f"{_VLLM_MODELS}/hy_v3_mtp.py", zeroed=True),
    "qwen3_next": FamilyRules(f"{_VLLM_MODELS}/qwen3_next_mtp.py, qwen3_5_mtp.py", evidence=READ),
    "qwen3_5": FamilyRules(f"{_VLLM_MODELS}/qwen3_5_mtp.py"),
    "intern_s2_preview": FamilyRules(f"{_VLLM_MODELS}/qwen3_5_mtp.py", evidence=READ),
    "nemotron_h": FamilyRules(f"{_VLLM_MODELS}/nemotron_h_mtp.py", evidence=READ, limit=1, layers="*E"),
    "mimo": FamilyRules(f"{_VLLM_MODELS}/mimo_mtp.py, mimo.py", embedding_first=False, trunk="before", zeroed=True),
}
_VLLM_DRAFTERS = {
    "eagle3": DrafterRules(f"{_VLLM_MODELS}/llama_eagle3.py", latent_source=f"{_VLLM_MODELS}/deepseek_eagle3.py"),
    "eagle": DrafterRules(f"{_VLLM_MODELS}/llama_eagle.py"),
    "dflash": DrafterRules(f"{_VLLM_MODELS}/qwen3_dflash.py"),
}
_AT_ONCE = {"method": "eagle3", "parallel_drafting": True}
_VLLM_READ = {"peagle": DrafterRules(f"{_VLLM_MODELS}/llama_eagle3.py", method=_AT_ONCE)}

ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        title="vLLM 0.32 (runner V1, as on CPUs)",
        repository="vllm-project/vllm",
        source="vllm/v1/spec_decode/llm_base_proposer.py",
        families=_VLLM_FAMILIES,
        evidence=_VLLM_RUN,
        drafters={**{name: replace(rules, evidence=_VLLM_RUN) for name, rules in _VLLM_DRAFTERS.items()}, **_VLLM_READ},
        counts="multiple",
    ),
    "vllm-v2": Engine(
        title="vLLM 0.32 (runner V2, as on GPUs)",
        repository="vllm-project/vllm",
        source="vllm/v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py",
        families=_VLLM_FAMILIES,
        evidence=READ,
        drafters={**_VLLM_DRAFTERS, **_VLLM_READ, "dspark": DrafterRules(f"{_VLLM_MODELS}/qwen3_dspark.py")},
        counts="known",
        several=lambda feeding: replace(feeding, module="own", keys="own"),
    ),
    "sglang": Engine(
        title="SGLang 0.5.23",
        repository="sgl-project/sglang",
        source="python/sglang/srt/speculative/eagle_worker_v2.py",
        families={
            "glm4_moe": FamilyRules(f"{_SGLANG_MODELS}/glm4_moe_nextn.py", limit=1),
            "deepseek_v3": FamilyRules(f"{_SGLANG_MODELS}/deepseek_nextn.py", limit=1),
            "glm4_moe_lite": FamilyRules(f"{_SGLANG_MODELS}/glm4_moe_lite_nextn.py", limit=1),
            "bailing_moe": FamilyRules(f"{_SGLANG_MODELS}/bailing_moe_nextn.py", limit=1),
            "hy_v3": FamilyRules(f"{_SGLANG_MODELS}/hunyuan_v3_nextn.py", limit=1),
            "qwen3_next": FamilyRules(f"{_SGLANG_MODELS}/qwen3_next_mtp.py, qwen3_5_mtp.py", limit=1),
            "qwen3_5": FamilyRules(f"{_SGLANG_MODELS}/qwen3_5_mtp.py", limit=1),
            "nemotron_h": FamilyRules(f"{_SGLANG_MODELS}/nemotron_h_mtp.py", limit=1, layers="*E"),
            "mimo": FamilyRules(f"{_SGLANG_MODELS}/mimo_mtp.py", embedding_first=False, limit=1, zeroed=True),
        },
        evidence=READ,
        drafters={
            "eagle3": DrafterRules(
                f"{_SGLANG_MODELS}/llama_eagle3.py", latent_source=f"{_SGLANG_MODELS}/kimi_k25_eagle3.py"
            ),
            "eagle": DrafterRules(f"{_SGLANG_MODELS}/llama_eagle.py"),
        },
    ),
    "transformers": Engine(
        title="transformers 5.23",
        repository="huggingface/transformers",
        source="src/transformers/generation/candidate_generator.py",
        families={
            "glm4_moe": FamilyRules("src/transformers/modeling_layers.py"),
            "deepseek_v3": FamilyRules("src/transformers/modeling_layers.py"),
        },
        evidence="run: tests/extensions/predict/test_predicted_engines.py",
        module="own",
        keys="own",
        counts="depths",
    ),
    "llama.cpp": Engine(
        title="llama.cpp of October 2026",
        repository="ggml-org/llama.cpp",
        source="common/speculative.cpp",
        families={"glm4_moe": FamilyRules("src/models/glm4-moe.cpp", limit=1)},
        evidence="run: tests/extensions/predict/test_llama_cpp.py",
        drafters={kind: DrafterRules("common/speculative.cpp", _LLAMA_RUN) for kind in ("eagle3", "dflash", "dspark")},
        first_row=True,
    ),
    "tensorrt-llm": Engine(
        title="TensorRT-LLM of 2026 (PyTorch backend)",
        repository="NVIDIA/TensorRT-LLM",
        source="tensorrt_llm/_torch/speculative/mtp.py, eagle3.py",
        families={
            "glm4_moe": FamilyRules(f"{_TENSORRT_MODELS}/modeling_glm.py"),
            "deepseek_v3": FamilyRules(f"{_TENSORRT_MODELS}/modeling_deepseekv3.py"),
        },
        evidence=READ,
        several=lambda feeding: replace(feeding, module="own", keys="window"),
    ),
}
"""Engines by the value of --engine."""


@dataclass(frozen=True)
class Difference:
    """A rule of an engine that differs from training.

    Attributes:
        rule: name of the field of `Feeding`.
        trained, engine: descriptions of both sides.
    """

    rule: str
    trained: str
    engine: str


def differences(trained: Feeding, engine: Feeding, count: int) -> list[Difference]:
    """Return the rules in which two feedings differ, for this many drafts."""
    found = []
    for row in fields(Feeding):
        one, other = getattr(trained, row.name), getattr(engine, row.name)
        if one != other and (count > 1 or row.name in FOR_ONE_DRAFT) and not _same(row.name, one, other, count):
            found.append(Difference(row.name, WORDS[row.name, one], WORDS[row.name, other]))
    return found


FOR_ONE_DRAFT = {"trunk", "zeroed", "keys", "first_row", "swapped"}
"""Rules that affect the first draft."""


def _same(rule: str, one: object, other: object, count: int) -> bool:
    """Return whether rules are the same for one draft, which sees the same rows whatever later drafts see."""
    return rule == "keys" and count == 1 and "none" not in (one, other)
