"""Tiny models that draft, unmodified copies, and a drafter that agrees with the target at a given rate."""

from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron_single import MOE, VOCABULARY, our_model, randomize, transformer_config
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.data.batch import depth_batch
from megatron_mtp.decoding import backend, batch, dense_layer, scheduler
from megatron_mtp.decoding import engine as engines
from megatron_mtp.decoding.backend import BACKENDS, Modules
from megatron_mtp.decoding.batch import DecodeBatch, Sequence
from megatron_mtp.decoding.block_tables import BlockTables
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.engine import Engine, generate
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.proposers import blocks, mtp
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.runner import STATIC_EXPERTS, Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.sequences import BatchShapes, Sequences
from megatron_mtp.model.arguments import MTPGPTModelConfig
from megatron_mtp.model.build import build
from megatron_mtp.model.head import Head
from megatron_mtp.model.stage_output import StageOutput
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.kinds import DRAFTERS

POSITIONS = 160

OWN_HEAD = [*range(4), *range(4, VOCABULARY, 3)]
BLOCKS: dict[str, Any] = {"drafter": "dflash", "drafter_num_layers": 2, "drafter_mask_token": 7}
MARKOV: dict[str, Any] = {**BLOCKS, "drafter": "dspark", "drafter_markov_rank": 6}
CONVOLVED: dict[str, Any] = {**MARKOV, "drafter": "dflash2"}

KINDS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha-tied-layernorm": {"num_query_groups": 4, "tied": True, "normalization": "LayerNorm"},
    "moe": MOE,
    "repeated": {"mtp_use_repeated_layer": True},
    "shared": {"mtp_use_repeated_layer": True, "shares_kv": True},
    "shared-moe": {"mtp_use_repeated_layer": True, "shares_kv": True, **MOE},
    "first-pass": {"mtp_use_repeated_layer": True, "first_pass_kv": True},
    "bias-ungated-qknorm": {
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": torch.nn.functional.gelu,
        "qk_layernorm": True,
    },
    "parallel": {"architecture": "parallel"},
    "windows": {"window_size": (5, 0), "window_attn_skip_freq": 2},
    "windows-sinks": {"window_size": (5, 0), "softmax_type": "learnable"},
    "eagle3": {"num_layers": 4, "drafter_layers": (1, 2, 3)},
    "eagle3-own-head": {"num_layers": 4, "drafter_layers": (1, 2, 3), "drafted": OWN_HEAD},
    "eagle": {"drafter_layers": (), "drafter": {"drafter": "eagle", "drafter_layers": None}},
    "dflash": {"num_layers": 4, "drafter_layers": (1, 3), "drafter": BLOCKS},
    "dspark": {"num_layers": 4, "drafter_layers": (1, 3), "drafter": MARKOV},
    "dspark-own-head": {"num_layers": 4, "drafter_layers": (1, 3), "drafter": MARKOV, "drafted": OWN_HEAD},
    "dflash2": {"num_layers": 4, "drafter_layers": (1, 3), "drafter": CONVOLVED},
    "domino": {
        "num_layers": 4,
        "drafter_layers": (1, 3),
        "drafter": {**MARKOV, "drafter": "domino", "drafter_gru_size": 10},
    },
    "peagle": {"num_layers": 4, "drafter_layers": (1, 2, 3), "drafter": {**BLOCKS, "drafter": "peagle"}},
    "peagle-own-head": {
        "num_layers": 4,
        "drafter_layers": (1, 2, 3),
        "drafter": {**BLOCKS, "drafter": "peagle"},
        "drafted": OWN_HEAD,
    },
}


LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}
"""Multi-latent attention, whose values have fewer channels than its keys."""


LATENT_KINDS: dict[str, dict[str, Any]] = {
    "mla": {},
    "mla-moe": MOE,
    "mla-first-pass": {"mtp_use_repeated_layer": True},
}


def model_of(kind: str, depths: int = 3, dtype: torch.dtype = torch.float64, **changes: Any) -> GPTModel:
    """Create a model of KINDS or LATENT_KINDS, with `changes` to its transformer configuration."""
    latent = kind in LATENT_KINDS
    model = _latent_model(kind, depths, changes) if latent else our_model(depths, **{**KINDS[kind], **changes})
    model.max_sequence_length = POSITIONS
    return model.to(dtype).eval()


def _latent_model(kind: str, depths: int, changes: dict[str, Any]) -> GPTModel:
    plain = transformer_config(depths)
    given = {field.name: getattr(plain, field.name) for field in fields(plain) if field.name in PLAIN_FIELDS}
    config = MTPGPTModelConfig(
        transformer=MLATransformerConfig(**{**given, **LATENT, **LATENT_KINDS[kind], **changes}),
        mtp=MTPConfig(mtp_repeated_layer_first_pass_kv="first-pass" in kind),
        vocab_size=VOCABULARY,
        seq_length=POSITIONS,
        position_embedding_type="rope",
    )
    model = build(config)
    randomize(model)
    return model.cuda()


PLAIN_FIELDS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads normalization gated_linear_unit activation_func "
    "add_bias_linear attention_dropout hidden_dropout transformer_impl mtp_num_layers mtp_loss_scaling_factor"
).split()


def runner_of(kind: str = "gqa", depths: int = 3, dtype: torch.dtype = torch.float64) -> Runner:
    return Runner(model_of(kind, depths, dtype))


def p_value_of(settings: dict[str, Any], drafted: list[int] | None = None, pair: Any = None) -> float:
    """Return p of the chi-square test over the 81 outputs of four tokens, from 4,000 seeds and a vocabulary of three.

    With so few tokens, drafter and target often agree. `pair`: a model and its twin, if not a GPT with 3 MTP layers.
    """
    model, twin = pair or (model_of("gqa", dtype=torch.float32, drafted=drafted), model_of("gqa"))
    target = Runner(model, vocab_size=3)
    seeds, prompt, sampling = 4000, [0, 1, 2, 0, 1, 2, 1], Sampling(2.0)
    drafter = Runner(model_of("mha-tied-layernorm", dtype=torch.float32), vocab_size=3)
    texts = generate(target, [prompt] * seeds, 4, sampling, settings, list(range(seeds)), drafter=drafter)
    assert texts.stats.accepted > seeds / 4 or not texts.stats.drafted
    expected: dict[tuple[int, ...], float] = {(): float(seeds)}
    for _ in range(4):
        logits_PV = trained_forwards(twin, [[*prompt, *path] for path in expected])[0][-1, :, :3]
        expected = {
            (*path, token): count * chance
            for (path, count), logits_V in zip(expected.items(), logits_PV, strict=True)
            for token, chance in enumerate(sampling.probabilities(logits_V).tolist())
        }
    observed = Counter(map(tuple, texts.token_ids))
    statistic = sum((observed[path] - count) ** 2 / count for path, count in expected.items())
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(statistic / 2)))


def prompts_of(batch: int, longest: int = 12, seed: int = 5) -> list[list[int]]:
    """Return prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + number * 7 % longest for number in range(batch)]
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def trained_forward(twin: GPTModel, text: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return logits of the trunk and of every MTP layer at all slots, each [S, V], from the training forward pass."""
    logits_S1V, drafted = trained_forwards(twin, [text])
    return logits_S1V[:, 0], [each_S1V[:, 0] for each_S1V in drafted]


@torch.no_grad()
def trained_forwards(twin: GPTModel, texts: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """Return the same for several sequences of one length, each [S, B, V]."""

    def capture(stage: StageOutput) -> Any:
        logits_SBV = stage.head.project(stage.hidden_SBH)
        return logits_SBV, [draft_logits(one.head, state) for one in stage.drafted for state in one.hidden]

    tokens = torch.tensor(texts, device="cuda")
    slots = tokens.size(1)
    batch: dict[str, Any] = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones_like(tokens).float()}
    mask = torch.ones(1, 1, slots, slots, device="cuda").tril().logical_not()
    positions = torch.arange(slots, device="cuda").expand_as(tokens)
    shifted = depth_batch(batch, twin.config.mtp_num_layers or 1)
    return twin(tokens, positions, mask, labels=tokens, output_processor=capture, output_processor_context=[shifted])


def draft_logits(head: Head, state_SBH: Tensor) -> Tensor:
    """Return logits [S, B, V] of a depth or step, with the drafter's own output rows if it has some."""
    hidden = head.weight.size(-1)
    bias = 0 if head.bias_rows is None else state_SBH[..., hidden:] @ head.bias_rows.t()
    if head.candidates is not None:
        unary_SBV = head.project(state_SBH[..., :hidden])
        least_SB1 = unary_SBV.topk(head.candidates).values[..., -1:]
        return (unary_SBV + bias).masked_fill(unary_SBV < least_SB1, -torch.inf)
    if head.own_rows is None or head.draft_vocabulary is None:
        return head.project(state_SBH[..., :hidden]) + bias
    logits_SBN = state_SBH[..., :hidden] @ head.own_rows.t() + bias
    logits_SBV = logits_SBN.new_full((*logits_SBN.shape[:2], len(head.weight)), -torch.inf)
    return logits_SBV.index_copy_(-1, head.draft_vocabulary.rows_K, logits_SBN)


def kind_for(method: str) -> str:
    """Return the kind of `KINDS` that a method drafts with."""
    if method in DRAFTERS:
        return method
    return {"parallel_heads": "parallel", "eagle3_tree": "eagle3", "eagle_tree": "eagle"}.get(method, "gqa")


def method_of(kind: str) -> str:
    """Return the method that drafts the way a kind of `KINDS` was trained."""
    drafter = kind.removesuffix("-own-head")
    return drafter if drafter in DRAFTERS else METHODS.get(kind, "mtp")


METHODS = {
    "parallel": "parallel_heads",
    "shared": "mtp_eagle",
    "shared-moe": "mtp_eagle",
    "first-pass": "mtp_eagle",
    "mla-first-pass": "mtp_eagle",
}


def run_every_step_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps in Python, so that calls can be observed: CUDA graphs and compiled code make no Python calls."""
    monkeypatch.setattr(batch, "can_record", lambda *_: False)
    draft_one_by_one(monkeypatch)


def draft_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MTP layers draft one at a time, and score, verify and store drafts in Python, even if a backend does it all
    at once.
    """
    for kind, name in product(BACKENDS.values(), ("draft", "accept")):
        monkeypatch.setattr(kind, name, lambda *_: None)


def want_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict shapes, as on a GPU."""
    for module in (scheduler, engines):
        monkeypatch.setattr(module, "wants_few_shapes", lambda _: True)


def place_static_experts_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a runner replace experts by `StaticExperts`."""
    monkeypatch.setenv(STATIC_EXPERTS, "1")


NO_KERNEL = ("empty", "new_empty", "set_")
ONE_KERNEL = {"scaled_dot_product_attention", "rms_norm"}
"""Operations that are one kernel on CUDA; on the CPU they consist of others."""


def _memory_of(values: Any) -> set[int]:
    """Return the addresses of tensors. Tensors in the format of a CPU library have none."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    return {one.untyped_storage().data_ptr() for one in tensors}


class Launches(TorchDispatchMode):
    """Count operations that compute: those that write, or that create new tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        name, named = operation.overloadpacket.__name__, named or {}
        if name not in ONE_KERNEL:
            with self:
                made = operation.decompose(*given, **named)
            if made is not NotImplemented:
                return made
        made = operation(*given, **named)
        new = _memory_of(made) - _memory_of((given, named))
        if (new or operation._schema.is_mutable) and not name.startswith(NO_KERNEL):
            self.names[name] += 1
        return made


@torch.inference_mode()
def launches_of_a_layer(monkeypatch: pytest.MonkeyPatch, kind: str, paged: bool, **changes: Any) -> float:
    """Count launches of one layer in the trunk's forward pass of a few rows, with CUDA's norms: half of two more
    layers.
    """
    monkeypatch.setattr(backend, "BACKENDS", {"modules": Modules})  # compiled code launches nothing
    monkeypatch.setattr(dense_layer, "short_norm", lambda norm: norm)
    place_static_experts_everywhere(monkeypatch)
    counts = []
    tables = BlockTables(torch.tensor([[5, 2, 0, 3], [1, 4, 6, 7]]), 8) if paged else runs(2, 127)
    for layers in (2, 4):
        target = Runner(model_of(kind, depths=1, dtype=torch.bfloat16, num_layers=layers, **changes))
        cache = KVCache(layers, tables)
        for _ in range(2):  # the first forward pass allocates memory
            rows = Rows(torch.tensor([20, 40]), 4, 64, tables, inside=True)
            with Launches() as launches:
                target.trunk(torch.ones(2, 4, dtype=torch.long), rows, cache)
        counts.append(launches.names.total())
    return (counts[1] - counts[0]) / 2


def without_numbers(model: GPTModel, fakes: FakeTensorMode) -> GPTModel:
    """Use weights that only have shapes, so that reading a value fails."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(fakes.from_tensor(weight).detach(), False)
        for name, held in module.named_buffers(recurse=False):
            module._buffers[name] = fakes.from_tensor(held)
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor):  # created on the device, but not a buffer
            module.inv_freq = fakes.from_tensor(module.inv_freq)
    return model


def runs(texts: int, capacity: int) -> BlockTables:
    """Return tables with one block per sequence, for all its slots and the scratch slot."""
    numbers = tuple(range(texts))
    return BlockTables(torch.tensor(numbers).unsqueeze(1).cuda(), texts, capacity + 1, numbers, texts, numbers)


def read_back(sequences: Sequences) -> list[list[int]]:
    """Return the tokens of every sequence that have not been copied to the host."""
    lengths = sequences.length_B.tolist()
    return [
        tokens_T[len(text) : length].tolist()
        for tokens_T, text, length in zip(sequences.tokens_BT, sequences.token_ids, lengths, strict=True)
    ]


def tree_of(base_B: Tensor, depth_BR: Tensor, ancestors_BRA: Tensor, window: int, tables: BlockTables) -> Rows:
    """Return rows of a tree whose slots start at `base_B`."""
    return Rows(base_B, depth_BR.size(1), window, tables, depth_BR=depth_BR, ancestors_BRA=ancestors_BRA)


def sequences_of(
    runner: Runner,
    prompts: list[list[int]],
    capacity: int,
    drafter: Runner | None = None,
    shapes: BatchShapes | None = None,
) -> Sequences:
    """Return a batch whose prompts have not run."""
    tables = runs(len(prompts), capacity)
    tables = replace(tables, table_BL=tables.table_BL.to(runner.device))
    return Sequences(prompts, list(range(len(prompts))), runner.new_memory(tables, drafter), tables, shapes)


def two_steps(kind: str) -> None:
    """Draft, verify and store two steps of a batch without values."""
    prompts, method = prompts_of(3), method_of(kind)
    model = model_of(kind, dtype=torch.bfloat16)
    with FakeTensorMode() as fakes:
        target = Runner(without_numbers(model, fakes))
        chosen = make_method(target, config_from({"method": method, "num_speculative_tokens": 3}), Sampling())
        sequences = sequences_of(target, prompts, 60, shapes=BatchShapes(growth=chosen.count + 1, fixed=True))
        for _ in range(2):
            batch.step(sequences, chosen, chosen.count)


class Agreeing(Proposer):
    """Replace another proposer's drafts by the target's next tokens, at a given rate for every position.

    Args:
        inner: proposer that drafts, and so fills its caches with rows of its own tokens.
        answers: plain decoding's output for each prompt, prompt included, by the sequence's seed.
        rate: probability of the target's token.
    """

    def __init__(self, inner: Proposer, answers: list[list[int]], rate: float = 0.7) -> None:
        super().__init__(inner.runner, inner.config)
        self.inner, self.answers, self.rate = inner, answers, rate
        self.observes = inner.observes  # type: ignore[misc]
        self.generator = torch.Generator().manual_seed(9)

    def nodes(self, count: int) -> int:
        return self.inner.nodes(count)

    @property
    def has_states(self) -> bool:
        return self.inner.has_states

    def missed(self, sequences: Sequences, count: int) -> int:
        return self.inner.missed(sequences, count)

    def catch_up(self, sequences: Sequences, round: Round, count: int) -> None:
        self.inner.catch_up(sequences, round, count)

    def propose(self, sequences: Sequences, round: Round, count: int) -> Draft:
        draft = self.inner.propose(sequences, round, count)
        tokens_BN = draft.tokens_BN.clone()
        for row, (text, number) in enumerate(zip(sequences.token_ids, sequences.seed_B.tolist(), strict=True)):
            answer = self.answers[number]
            for place, node in enumerate(self._path(draft, row), start=len(text)):
                if place < len(answer) and torch.rand((), generator=self.generator) < self.rate:
                    tokens_BN[row, node] = answer[place]
        return Draft(tokens_BN, None, draft.parents_BN, draft.valid_BN)

    def _path(self, draft: Draft, row: int) -> list[int]:
        """Return a path of nodes from the root; picks among siblings at random."""
        parents, valid = draft.parents()[row].tolist(), draft.valid()[row].tolist()
        path: list[int] = []
        while below := [n for n, above in enumerate(parents) if above == (path[-1] + 1 if path else 0) and valid[n]]:
            path.append(below[int(torch.randint(len(below), (), generator=self.generator))])
        return path

    def observe(self, sequences: Sequences, draft: Draft, logits_BRV: Tensor) -> None:
        self.inner.observe(sequences, draft, logits_BRV)


class Recorder:
    """Record logits of every draft, with sequence lengths and the position in the draft."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: list[tuple[list[int], int, Tensor]] = []
        run_every_step_in_python(monkeypatch)
        real = mtp.pick

        def pick(logits_BV: Tensor, round: Any, position: int) -> tuple[Tensor, Tensor | None]:
            self.drafts.append((round.noise.position_B.tolist(), position, logits_BV.clone()))
            return real(logits_BV, round, position)

        for module in (mtp, blocks):
            monkeypatch.setattr(module, "pick", pick)


@dataclass
class Driven:
    """Proposer and statistics of a run."""

    proposer: Proposer
    stats: AcceptanceStats


def engine_with(
    runner: Runner,
    prompts: list[list[int]],
    new_tokens: int,
    speculative: dict[str, Any] | None,
    answers: list[list[int]] | None = None,
    drafter: Runner | None = None,
    sampling: Sampling | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> tuple[Engine, list[Sequence]]:
    """Create an engine as `generate` does, and add the prompts with their index as seed."""
    config = config_from(speculative or {"method": "plain"})
    requests = [
        Request(prompt, new_tokens, sampling or Sampling(), number, stop_ids=stop_ids, speculative=config)
        for number, prompt in enumerate(prompts)
    ]
    engine = engines._engine_for(runner, requests, drafter)
    if answers is not None:
        engine._method_of(requests[0])
        method = engine._methods[config, requests[0].sampling.greedy]
        method.proposer = Agreeing(method.proposer, answers)
    return engine, [engine.scheduler.seqs[engine.add(request)] for request in requests]


def prefilled(
    runner: Runner,
    prompts: list[list[int]],
    speculative: dict[str, Any] | None = None,
    sampling: Sampling | None = None,
    drafter: Runner | None = None,
) -> DecodeBatch:
    """Return sequences that have their first tokens."""
    engine, _ = engine_with(runner, prompts, 100, speculative, drafter=drafter, sampling=sampling)
    engine.step()
    (made,) = engine.scheduler.decoded.values()
    return made


def run(
    runner: Runner,
    prompts: list[list[int]],
    new_tokens: int,
    speculative: dict[str, Any] | None,
    answers: list[list[int]] | None = None,
    stop_ids: frozenset[int] = frozenset(),
    drafter: Runner | None = None,
) -> tuple[Sequences, Driven]:
    """Decode greedily, with drafts that match `answers` if given. Return what is left in memory at the end."""
    engine, texts = engine_with(runner, prompts, new_tokens, speculative, answers, drafter, stop_ids=stop_ids)
    held: dict[int, tuple[list[int], int | None]] = {}
    proposer, free = texts[0].method.proposer, engine.scheduler.free

    def freed(seq: Sequence) -> None:
        held[seq.number] = [*seq.block_table.blocks], seq.entry
        free(seq)

    engine.scheduler.free = freed  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
    for text in texts:
        text.block_table.blocks, text.entry = held[text.number]
    memory, tables = engine.scheduler.memory, engine.scheduler.block_tables_of(texts)
    used = Sequences([text.tokens for text in texts], [*range(len(texts))], memory, tables)
    used.progress = [text.progress for text in texts]
    return used, Driven(proposer, engine.stats)


def first_rows(cache: KVCache, tables: BlockTables, row: int, count: int) -> list[Tensor | None]:
    """Return keys and values of a sequence's first rows, [G, count, C], layer by layer."""
    held = (*cache.keys, *cache.values)
    rows = Rows(tables.table_BL[:, 0], 1, count, tables)
    return [None if one is None else rows.window_of(one)[row] for one in held]
