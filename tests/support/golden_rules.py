"""Describe the rules of every family on tiny configurations; `golden/rules.json` has a digest per family.

    python tests/support/golden_rules.py                   # rewrite the file after an intended change
    python tests/support/golden_rules.py --since COMMIT    # print how the rules differ from those of COMMIT

`test_golden.py` compares the digests. If one differs, it prints the difference from the commit that last wrote the
file; the rules of a commit are computed by its own code.

No model is built: a case is a `config.json` of `hf_models.py` or `trunk_models.py` with the changes of a variant. A
line is a group of rules that differ only in the numbers of layers and experts:

    model.layers.{a}.mlp.down_proj.weight 48x56 -> decoder.layers.{a}.mlp.linear_fc2.weight 48x56 : same  [a=0-2]

A map is described by what it does to numbered tensors (`same`, `one after another`, `transposed`, ...), with a checksum
of the result.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hf_models import MODELS, SIZES, Model
from torch import Tensor
from trunk_models import LEFT, TRUNKS

from megatron_mtp.checkpoint.families import FAMILIES, Family, Layout, family_of, own_families
from megatron_mtp.checkpoint.families.rules import HFTensor, Piece, Rule
from megatron_mtp.checkpoint.families.trunk import ZERO_QKV_BIAS, ZERO_ROUTER_BIAS
from megatron_mtp.checkpoint.families.wrapped import PREFIXES, WRAPPERS
from megatron_mtp.checkpoint.hf.config import HFConfig

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "golden" / "rules.json"
Keys = dict[str, Any]
Record = dict[str, Any]

SEEN = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.visual.blocks.0.weight",
    "vision_tower.blocks.0.weight",
    "mtp.layers.0.self_attn.q_proj.weight",
    "model.mtp_linear_proj.0.bias",
)
"""Names that a folder may contain in addition to those of rules; a family passes some of them through."""
ALONE = {
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_conv_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": False,
    "q_lora_rank": None,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "shared_expert_intermediate_size": 12,
    "shared_intermediate_size": 12,
}
"""Tied embeddings, no MTP layers, all biases, and no optional parts."""
MIXED = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [1],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
}
"""One MTP layer, norms of queries and keys, a dense layer, and biases that are zero in the folder."""
HYBRID_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
BY_FAMILY: dict[str, tuple[Keys, Keys, Keys]] = {
    "qwen3_next": ({}, {"layer_types": HYBRID_LAYERS, "num_hidden_layers": 4}, {"layer_types": HYBRID_LAYERS[1:3] * 2}),
    "qwen3_5": ({}, {"layer_types": HYBRID_LAYERS, "num_hidden_layers": 4}, {"layer_types": HYBRID_LAYERS[1:3] * 2}),
    "nemotron_h": (
        {"mtp_hybrid_override_pattern": "*E"},
        {"layers_block_type": ["mamba", "full_attention"], "use_bias": False, "use_conv_bias": True},
        {"layers_block_type": ["moe", "mamba", "mlp"], "num_hidden_layers": 3, "moe_latent_size": 16},
    ),
    "llama": ({}, {}, {"head_dim": 8}),
}
"""Additional changes of the three cases, by the first `model_type` of a family."""


def record() -> Record:
    """Return every family of this package, and every model type around a text model."""
    families = {family.model_types[0]: of_family(family) for family in own_families()}
    return {"families": families, "around a text model": {name: around(name) for name in WRAPPERS}}


def digest(rules: object) -> str:
    """Return sixteen hex digits that depend on every flag, rule, and the order of rules."""
    return hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:16]


def of_family(family: Family) -> Record:
    kind = family.model_types[0]
    base, depths = _base(family), family.depths
    most = 0 if depths is None else min(depths.limit or 2, 2)
    all_forms, zeros = frozenset(family.features), frozenset({"head", ZERO_QKV_BIAS, ZERO_ROUTER_BIAS})
    own = BY_FAMILY.get(kind, ({}, {}, {}))
    cases = [
        ("everything", {}, Layout(most, all_forms)),
        ("tied, biased, no depths", ALONE, Layout(0)),
        ("norms, a dense layer, one depth", MIXED, Layout(min(most, 1), zeros)),
    ]
    facts: Record = {
        "title": family.title,
        "model_types": " ".join(family.model_types),
        "runs": family.untrainable or "in Megatron",
        "depths": None if depths is None else [depths.pattern, depths.embedding_first, depths.before_norm],
    }
    for (name, changes, layout), more in zip(cases, own, strict=True):
        facts[name] = _case(family, HFConfig({**base, **changes, **more}, kind), layout)
    return facts


def _base(family: Family) -> Keys:
    """Return the keys of the family's first row in the tables of tiny models."""
    tables: dict[str, Model] = {**MODELS, **TRUNKS, **LEFT}
    row = next(model for model in tables.values() if _type_of(model) in family.model_types)
    return {**SIZES, **row.config, **row.keys}


def _type_of(model: Model) -> str:
    inner = model.config.get("model_type") if model.around is not None else None
    return str(model.keys.get("model_type") or inner or model.model_type)


def around(model_type: str) -> list[str]:
    """Return the rules around a one-layer Llama, with the text model under the last prefix."""
    keys = {**SIZES, "num_hidden_layers": 1, "model_type": "llama"}
    config = HFConfig.from_keys({"model_type": model_type, "text_config": keys})
    layout = Layout(1, frozenset({"head", list(PREFIXES)[-1]}), ("vision_tower.weight",))
    family = family_of(config)
    return _lines(family.all_rules(family.complete(config), layout))


def _case(family: Family, config: HFConfig, layout: Layout) -> Record:
    """Return a family's result for a config: the layout found in its rules' names, flags, and rules as lines."""
    if family.depths is not None:
        config = HFConfig({**config.keys, family.depths.keys[0]: layout.depths}, config.model_type)
    config = family.complete(config)
    names = [tensor.name for rule in family.rules(config, layout) for tensor in rule.hf]
    seen = family.layout(config, [*names, *SEEN])
    words = [f"depths {seen.depths}", *sorted(seen.features), *(f"carries {name}" for name in seen.carried)]
    rules = family.all_rules(config, Layout(layout.depths, layout.features, seen.carried))
    facts: Record = {"layout": "; ".join(words), "flags": _flags(family.flags, config, layout)}
    if family.depths is not None:
        facts["carried depths"] = [family.depths.depth_of(config, name) for name in seen.carried]
    return {key: value for key, value in facts.items() if value} | {"rules": _lines(rules)}


def _flags(make: Callable[[HFConfig, Layout], list[str]] | None, config: HFConfig, layout: Layout) -> list[str]:
    """Return flags sorted by name; the last of several wins."""
    try:
        words = [] if make is None else " ".join(["", *make(config, layout)]).split(" --")[1:]
    except ValueError as error:
        return [f"refused: {error}"]
    return sorted({word.split()[0]: f"--{word}" for word in words}.values())


def _lines(rules: Iterable[Rule]) -> list[str]:
    groups: dict[str, list[tuple[int, ...]]] = {}
    for rule in rules:
        template, numbers = _template(rule)
        groups.setdefault(f"{template} : {_moves(rule)}", []).append(numbers)
    return [line + _ranges(numbers) for line, numbers in groups.items()]


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=weight)\d+$|(?<=bias)\d+$")


def _template(rule: Rule) -> tuple[str, tuple[int, ...]]:
    """Return a rule with letters instead of the numbers in its first name, and these numbers."""
    first = rule.hf[0].name if rule.hf else rule.mcore[0].key
    numbers = [int(found) for found in _NUMBER.findall(first)]
    hf = " + ".join(_hf(tensor, numbers) for tensor in rule.hf)
    return f"{hf} -> {' + '.join(_piece(piece, numbers) for piece in rule.mcore)}", tuple(numbers)


def _hf(tensor: HFTensor, numbers: list[int]) -> str:
    return f"{_lettered(tensor.name, numbers)[0]} {_by(tensor.shape)}"


def _piece(piece: Piece, numbers: list[int]) -> str:
    key, left = _lettered(piece.key, numbers)
    words = [key, _by(piece.shape)]
    if piece.offset is not None:
        start = [str(one) for one in piece.offset]
        if left and numbers[left[0]] == piece.offset[0]:
            start[0] = _letter(left[0])
        words.append(f"at {','.join(start)} of {_by(piece.whole)}")
    words += [f"or {_lettered(alias, numbers)[0]}" for alias in piece.aliases]
    words += [word for word, holds in (("padded", piece.padded), ("wide", piece.wide)) if holds]
    return " ".join(words)


def _lettered(name: str, numbers: Sequence[int]) -> tuple[str, list[int]]:
    """Return a name with letters for these numbers, each used at most once and in order, and the places left over."""
    left = list(range(len(numbers)))

    def letter(match: re.Match[str]) -> str:
        place = next((place for place in left if numbers[place] == int(match.group())), None)
        if place is None:
            return match.group()
        left.remove(place)
        return _letter(place)

    return _NUMBER.sub(letter, name), left


def _letter(place: int) -> str:
    return f"{{{'abcdef'[place]}}}"


def _by(shape: tuple[int, ...] | None) -> str:
    return "unchanged" if shape is None else "x".join(map(str, shape)) or "scalar"


def _ranges(numbers: list[tuple[int, ...]]) -> str:
    """Return `a=0-2 b=0-5` if all combinations occur, otherwise every occurrence."""
    if not numbers[0]:
        return f"  [{len(numbers)} times]" if len(numbers) > 1 else ""
    values = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if sorted(product(*values)) == sorted(numbers):
        return "  [" + " ".join(f"{'abcdef'[i]}={_range(column)}" for i, column in enumerate(values)) + "]"
    return "  [" + " ".join(".".join(map(str, one)) for one in numbers) + "]"


def _range(values: list[int]) -> str:
    whole = values == list(range(values[0], values[-1] + 1)) and len(values) > 2
    return f"{values[0]}-{values[-1]}" if whole else ",".join(map(str, values))


def _moves(rule: Rule) -> str:
    """Describe a rule's map, from tensors with distinct numbers, equal ones, or zeros."""
    shapes = [tensor.shape or (2, 3) for tensor in rule.hf]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    numbered = [_count(shape, 1 + sum(sizes[:place])) for place, shape in enumerate(shapes)]
    given = (
        ("", numbered),
        ("of equals, ", [numbered[0]] * len(shapes)),
        ("of zeros, ", [0 * one for one in numbered]),
    )
    for words, tensors in given:
        try:
            out = rule.to_mcore(tensors)
        except ValueError:
            continue
        back = rule.to_hf(out)
        inverse = "" if _equal(back, tensors) else f", back {_checksum(back)}"
        rounds = ", rounds" if rule.rounds else ""
        return f"{words}{_described(tensors, out)}{inverse}{rounds}"
    raise AssertionError(f"no tensors fit the rule of {rule.hf[0].name}")


def _count(shape: tuple[int, ...], start: int) -> Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def _described(given: list[Tensor], out: list[Tensor]) -> str:
    if _equal(given, out):
        return "same"
    if not out:
        return "dropped"
    words = next((words for words, move in KNOWN.items() if _equal(_tried(move, given), out)), "moved")
    return f"{words} {_checksum(out)}"


def _tried(move: Callable[[list[Tensor]], list[Tensor]], given: list[Tensor]) -> list[Tensor]:
    try:
        return move(given)
    except (RuntimeError, IndexError):
        return []


def _halves(tensor: Tensor, dim: int) -> Tensor:
    return torch.cat(tensor.chunk(2, dim)[::-1], dim)


KNOWN: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "one of equals": lambda given: given[:1],
    "transposed": lambda given: [one.transpose(-1, -2) for one in given],
    "columns' halves swapped": lambda given: [_halves(one, 1) for one in given],
    "rows' halves swapped": lambda given: [_halves(one, 0) for one in given],
    "one after another": lambda given: [torch.cat(given)],
    "side by side": lambda given: [torch.cat(given, 1)],
    "with a first axis": lambda given: [one[None] for one in given],
    "one after another, with a first axis": lambda given: [torch.cat(given)[None]],
    "stacked": lambda given: [torch.stack(given)],
    "minus 1": lambda given: [one - 1 for one in given],
    "minus 1, and as it was": lambda given: [given[0], given[0] - 1],
}
"""Tensor movements by their description."""


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _checksum(tensors: Iterable[Tensor]) -> str:
    sum_so_far = 0
    for tensor in tensors:
        shape = repr((tuple(tensor.shape), str(tensor.dtype))).encode()
        sum_so_far = zlib.crc32(tensor.contiguous().numpy().tobytes(), zlib.crc32(shape, sum_so_far))
    return f"{sum_so_far:08x}"


def differences(before: object, now: object, where: str = "") -> list[str]:
    """Return removed lines (-) and new lines (+)."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = ((name, before.get(name), now.get(name)) for name in dict.fromkeys([*before, *now]))
        return [line for name, one, other in pairs for line in differences(one, other, f"{where}{name}: ")]
    if isinstance(before, list) and isinstance(now, list) and before != now:
        lacks = [f"- {where}{one}" for one in before if one not in now]
        return lacks + [f"+ {where}{one}" for one in now if one not in before] or [f"{where}another order"]
    return [] if before == now else [f"- {where}{before}", f"+ {where}{now}"]


@cache
def of_commit(commit: str | None) -> Record:
    """Return `record` at a commit, or at the commit that last wrote the file.

    Raises:
        subprocess.CalledProcessError: git is missing, or has no such commit.
    """
    git = ["git", "-C", str(ROOT)]
    if commit is None:
        log = [*git, "log", "-1", "--format=%H", "--", str(FILE)]
        commit = subprocess.run(log, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as then:
        packed = subprocess.run([*git, "archive", commit, "megatron_mtp", "tests"], check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", then], input=packed.stdout, check=True)
        words = [sys.executable, f"{then}/tests/support/golden_rules.py", "--print"]
        made = subprocess.run(words, env={**os.environ, "PYTHONPATH": then}, check=True, stdout=subprocess.PIPE)
        return dict(json.loads(made.stdout.splitlines()[-1]))


def main(verb: str = "--write", commit: str | None = None) -> None:
    """Print the rules, print how they differ from a commit's, or write `golden/rules.json`."""
    if verb == "--since":
        print("\n".join(differences(of_commit(commit), json.loads(json.dumps(record())))))
    elif verb == "--print":
        print(json.dumps(record()))
    else:
        assert {name for family in own_families() for name in family.model_types} <= FAMILIES.keys()
        digests = {kind: {name: digest(one) for name, one in of_kind.items()} for kind, of_kind in record().items()}
        FILE.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
