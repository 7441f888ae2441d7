"""`prove` without ranks: the shrunk model, the reference, the causes, and its messages."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from megatron_mtp.extensions.prove import grads, proving, script, stand_ins, worker
from megatron_mtp.extensions.prove.cases import CP, DP, MICROBATCHES, ONE, Case, batch_of, cases_of
from megatron_mtp.extensions.prove.command import main
from megatron_mtp.extensions.prove.hypotheses import hypotheses
from megatron_mtp.extensions.prove.proving import BASE, NOT_RUN, RIGHT, WRONG, Judge, Proof, Verdict
from megatron_mtp.extensions.prove.reference import PAPER, Microbatch, Model, Rule, Weights, expected
from megatron_mtp.extensions.prove.report import as_json, as_page, as_text
from megatron_mtp.extensions.prove.shrink import Tiny, shrink, words_of

FLAGS = (
    "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --mtp-num-layers 2 --position-embedding-type none"
).split()
TINY = shrink(FLAGS)


def weights_of(tiny: Tiny) -> Weights:
    """Return weights of a model without grouped queries, biases and learned positions."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        centre = float(len(shape) == 1)
        return (centre + 0.2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()

    weights = {name: drawn(96, 32) for name in ("embedding.word_embeddings.weight", "output_layer.weight")}
    weights["decoder.final_layernorm.weight"] = drawn(32)
    layers = [f"decoder.layers.{number}." for number in range(tiny.config["num_layers"])]
    for number in range(tiny.depths):
        prefix = f"mtp.layers.{number}."
        layers.append(f"{prefix}mtp_model_layer.")
        weights |= {f"{prefix}{name}.weight": drawn(32) for name in ("enorm", "hnorm", "final_layernorm")}
        weights[f"{prefix}eh_proj.weight"] = drawn(32, 64)
    for prefix in layers:
        weights |= {f"{prefix}{name}.weight": drawn(32) for name in ("input_layernorm", "pre_mlp_layernorm")}
        weights[f"{prefix}self_attention.linear_qkv.weight"] = drawn(96, 32)
        weights[f"{prefix}self_attention.linear_proj.weight"] = drawn(32, 32)
        weights[f"{prefix}mlp.linear_fc1.weight"], weights[f"{prefix}mlp.linear_fc2.weight"] = (
            drawn(96, 32),
            drawn(32, 48),
        )
    return weights


# --- shrink ----------------------------------------------------------------------------------------------------------


def test_a_launch_line_shrinks_and_says_what_changed() -> None:
    tiny = shrink([*FLAGS, "--bf16", "--lr", "1e-4", "--fp8_format=hybrid", "--mtp-num-layers", "5"])
    assert tiny.depths == 3
    assert "--mtp-num-layers 3 for 5" in tiny.changed
    assert "--hidden-size 32 for 7168" in tiny.changed
    assert tiny.left_out == {"--fp8-format": "float32 instead"}
    assert tiny.in_bf16
    assert tiny.unread == ("--lr",)


def test_the_kind_of_model_is_kept() -> None:
    tiny = shrink(
        "--mtp-num-layers 1 --multi-latent-attention --kv-lora-rank 512 --num-experts 256 --moe-router-topk 8 "
        "--moe-layer-freq ([0]*3+[1]*58) --moe-router-score-function sigmoid --calculate-per-token-loss "
        "--pipeline-model-parallel-layout Ettt*2|tt|mL --expert-model-parallel-size 8".split()
    )
    config = tiny.config
    assert (config["multi_latent_attention"], config["q_lora_rank"], config["kv_lora_rank"]) == (True, None, 16)
    assert (config["num_moe_experts"], config["moe_layer_freq"]) == (4, [0, 1, 1, 1])
    assert config["moe_router_score_function"] == "sigmoid"
    assert config["calculate_per_token_loss"]
    assert tiny.model["tied"]
    assert tiny.own_stage


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_a_hybrid_keeps_its_kinds_of_layers_and_its_depths(flag: str) -> None:
    tiny = shrink([flag, "M-M-M*|-M-M*-/*-/*-"])
    assert (tiny.model["pattern"], tiny.depths, tiny.config["mamba_num_heads"]) == ("M-*M/*-/*-", 2, 8)
    assert "--hybrid-layer-pattern M-*M/*-/*- for M-M-M*|-M-M*-/*-/*-" in tiny.changed
    cases, skipped = cases_of(tiny, everything=True)
    assert {(case.batch, case.per_token) for case in cases if case.replicas == 2} == {
        (batch, per_token) for batch in ("holes", "packed") for per_token in (False, True)
    }
    assert skipped["MTP stage of its own"] == "a hybrid has its MTP layers on the last stage"


def test_a_bf16_launch_line_adds_bf16_cases_to_the_float32_cases() -> None:
    cases, _ = cases_of(shrink([*FLAGS, "--bf16"]), everything=False)
    half = [case.title for case in cases if case.in_bf16]
    assert half == [
        f"{layout}, {batch} in BF16"
        for layout in ("1 process", "DP 2")
        for batch in ("masked rows", "packed documents")
    ]
    assert len(cases) == len(half) + len(cases_of(TINY, everything=False)[0])
    experts, _ = cases_of(shrink([*FLAGS, "--bf16", "--num-experts", "8"]), everything=True)
    assert not any(case.in_bf16 for case in experts)


def test_all_adds_cases_to_those_of_the_launch_line() -> None:
    cases, skipped = cases_of(shrink([*FLAGS, "--context-parallel-size", "8"]), everything=False)
    assert {case.layout.name for case in cases} == {"1 process", "DP 2", "CP 2"}
    assert skipped["EP 2"] == "the flags have no experts"
    every, skipped = cases_of(TINY, everything=True)
    assert len(every) > 2 * len(cases)
    assert [*skipped] == ["EP 2"]
    assert any(case.per_token for case in every)
    assert any(case.recompute for case in every)
    _, skipped = cases_of(replace(TINY, attached=True), everything=True)
    assert skipped["MTP stage of its own"] == "attached layers have no stage of their own"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--num-layers 4", "have no MTP layers"),
        ("--mtp-num-layers two", "--mtp-num-layers is 'two'; give a whole number"),
        ("--mtp-num-layers", "--mtp-num-layers has no value"),
        ("--mtp-num-layers 1 --norm-epsilon small", "--norm-epsilon is 'small'; give a number"),
        ("--mtp-num-layers 1 --position-embedding-type alibi", "cannot shrink"),
        ("--hybrid-layer-pattern MG*-/*", "a hybrid with layers G cannot be shrunk; prove knows M * - E"),
        ("--mtp-num-layers 1 --hybrid-layer-pattern M*M*", "M*M* has no MTP layers; give them behind /"),
        ("--mtp-num-layers 1 --spec mine layers", "--spec cannot be shrunk: the layers are of a module of yours"),
        ("pretrain_gpt.py --mtp-num-layers 1", "'pretrain_gpt.py', which is not a flag"),
    ],
)
def test_a_launch_line_that_cannot_be_shrunk_is_rejected(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--", *words.split()], "megatron-mtp prove") == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_flags_of_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "num_layers: 61\nswiglu: true\nbf16: false\nmtp-num-layers: 2\nrecompute_modules: [core_attn, mlp]\n"
    )
    words = "--num-layers 61 --swiglu --mtp-num-layers 2 --recompute-modules core_attn mlp"
    assert words_of(file) == words.split()
    file.write_text("- a list")
    with pytest.raises(ValueError, match="no mapping"):
        words_of(file)


def test_a_yaml_file_without_pyyaml_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["--config", str(tmp_path / "run.yaml")], "megatron-mtp prove") == 2
    assert "--config needs PyYAML" in capsys.readouterr().err


def test_a_missing_launch_line_or_megatron_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        ([], "there is no launch line"),
        (["--seconds", "0", "--", *FLAGS], "--seconds is 0.0"),
        (["--megatron", str(tmp_path), "--", *FLAGS], "has no folder megatron/core"),
    ):
        assert main(arguments, "megatron-mtp prove") == 2
        assert sentence in capsys.readouterr().err


def test_a_megatron_import_error_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = tmp_path / "megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('a module of ours is missing')\n")
    assert main(["--megatron", str(tmp_path), "--", *FLAGS], "megatron-mtp prove") == 2
    said = capsys.readouterr().err
    assert "cannot be imported (ImportError: a module of ours is missing)" in said
    assert len(said.splitlines()) == 1


def test_unresponsive_ranks_are_terminated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = tmp_path / "worker.py"
    silent.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(worker, "__file__", str(silent))
    monkeypatch.setattr(proving, "SILENCE", 0.5)
    assert main(["--", *FLAGS], "megatron-mtp prove") == 2
    said = capsys.readouterr().err
    assert "cannot be imported (no response within" in said
    assert len(said.splitlines()) == 1


# --- reference -------------------------------------------------------------------------------------------------------


def plain_losses(weights: Weights, kind: str, number: int) -> list[tuple[Tensor, float]]:
    """Return sum and count of the main loss and of each depth, document by document, with torch's own functions."""
    batch = batch_of(kind, number)
    assert batch.labels is not None
    found = [(torch.zeros((), dtype=torch.float64), 0.0)] * 3
    bounds = batch.held or [0, batch.tokens.size(1)]

    def norm(name: str, values: Tensor) -> Tensor:
        return rms_norm(values, (32,), weights[f"{name}.weight"], 1e-5)

    def layer(prefix: str, values: Tensor) -> Tensor:
        mixed = norm(f"{prefix}input_layernorm", values) @ weights[f"{prefix}self_attention.linear_qkv.weight"].T
        query, key, value = (part.transpose(0, 1) for part in mixed.view(-1, 4, 3, 8).unbind(2))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
        values = values + attended @ weights[f"{prefix}self_attention.linear_proj.weight"].T
        inner = norm(f"{prefix}pre_mlp_layernorm", values) @ weights[f"{prefix}mlp.linear_fc1.weight"].T
        gate, up = inner.chunk(2, -1)
        return values + (silu(gate) * up) @ weights[f"{prefix}mlp.linear_fc2.weight"].T

    embedding, head = weights["embedding.word_embeddings.weight"], weights["output_layer.weight"]
    for row, labels, mask in zip(batch.tokens, batch.labels, batch.mask, strict=True):
        for start, end in pairwise(bounds):
            tokens, targets, counts = row[start:end], labels[start:end], mask[start:end].double()
            hidden = embedding[tokens]
            for number_ in range(4):
                hidden = layer(f"decoder.layers.{number_}.", hidden)
            hidden = norm("decoder.final_layernorm", hidden)
            for depth in range(min(3, end - start)):
                if depth:  # position i takes the token at i + depth, and predicts the next one
                    prefix = f"mtp.layers.{depth - 1}."
                    hidden = hidden[:-1]
                    both = [norm(f"{prefix}enorm", embedding[tokens[depth:]]), norm(f"{prefix}hnorm", hidden)]
                    hidden = torch.cat(both, -1) @ weights[f"{prefix}eh_proj.weight"].T
                    hidden = norm(f"{prefix}final_layernorm", layer(f"{prefix}mtp_model_layer.", hidden))
                losses = cross_entropy(hidden @ head.T, targets[depth:], reduction="none")
                total, count = found[depth]
                found[depth] = total + (losses * counts[depth:]).sum(), count + float(counts[depth:].sum())
    return found


@pytest.mark.parametrize("kind", ["rows", "holes", "packed"])
def test_the_reference_matches_the_papers_model_per_document(kind: str) -> None:
    weights = weights_of(TINY)
    plain = [plain_losses(weights, kind, number) for number in range(2)]
    total = sum((main / count + 0.05 * (one / n + two / m)) / 2 for (main, count), (one, n), (two, m) in plain)
    gradients = torch.autograd.grad(torch.as_tensor(total), list(weights.values()))
    batches = [Microbatch.of(batch_of(kind, number), ranks=1) for number in range(2)]
    right = expected(Model(weights, TINY.config, TINY.model), batches, per_token=False)
    logged = [sum(float(one[depth][0].detach()) / one[depth][1] for one in plain) / 2 for depth in (1, 2)]
    assert right.logged == pytest.approx(logged, rel=1e-12)
    for name, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(right.gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_a_per_token_loss_weights_microbatches_by_target_count() -> None:
    weights = weights_of(TINY)
    plain = [plain_losses(weights, "holes", number) for number in range(2)]
    every = sum(main[1] for main, *_ in plain)
    total = sum((main + 0.05 * count * (one / n + two / m)) / every for (main, count), (one, n), (two, m) in plain)
    gradient = torch.autograd.grad(torch.as_tensor(total), weights["mtp.layers.0.eh_proj.weight"])[0]
    batches = [Microbatch.of(batch_of("holes", number), ranks=1) for number in range(2)]
    right = expected(Model(weights, TINY.config, TINY.model), batches, per_token=True)
    torch.testing.assert_close(right.gradients["mtp.layers.0.eh_proj.weight"], gradient, rtol=1e-9, atol=1e-12)


def test_ranks_hold_a_chunk_and_its_mirror_image() -> None:
    batch = Microbatch.of(batch_of("packed", 0), ranks=2)
    owner, _ = batch.owners()
    assert owner.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0] + [0] * 3 + [1] * 6 + [0] * 3
    assert [stand_ins.positions_of([0, 4, 12], 2, rank).tolist() for rank in (0, 1)] == [
        [0, 3, 4, 5, 10, 11],
        [1, 2, 6, 7, 8, 9],
    ]


# --- a custom step ----------------------------------------------------------------------------------------------------


STEP_FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --swiglu --vocab-size 96 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --mtp-num-layers 2 --position-embedding-type none "
    "--hidden-dropout 0 --attention-dropout 0 --seq-length 24"
).split()


def test_omitted_sizes_have_megatrons_defaults() -> None:
    words = "--mtp-num-layers 5 --hidden-size 64 --num-attention-heads 8 --position-embedding-type rope"
    dropout = "--hidden-dropout 0 --attention-dropout 0"
    config = grads.described(f"{words} {dropout}".split()).config
    sizes = [config[name] for name in ("kv_channels", "num_query_groups", "mtp_num_layers", "num_attention_heads")]
    assert sizes == [8, 8, 5, 8]
    config = grads.described(
        f"{words} {dropout} --multi-latent-attention --rope-type rope --v-head-dim 9".split()
    ).config
    assert [config[name] for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim")] == [32, 128, 9]


def written_step(folder: Path, rule: Rule, *changes: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Write a step of a loop whose MTP loss follows a rule: two microbatches of packed documents."""
    weights = weights_of(TINY)
    batches = [batch_of("packed", number) for number in range(2)]
    found = expected(Model(weights, TINY.config, TINY.model), [Microbatch.of(one, 1) for one in batches], False, rule)
    tensors = {"losses": torch.tensor(found.logged)}
    for name, weight in weights.items():
        tensors[f"weights.module.{name}"] = weight.detach().float()
        tensors[f"gradients.module.{name}"] = found.gradients[name].float()
    for number, batch in enumerate(batches):
        assert batch.labels is not None
        tensors |= {f"microbatches.{number}.{name}": getattr(batch, name) for name in ("tokens", "labels")}
        tensors[f"microbatches.{number}.loss_mask"] = batch.mask
        tensors[f"microbatches.{number}.cu_seqlens"] = torch.tensor(batch.held)
    for change in changes:
        change(tensors)
    folder.mkdir(exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "step.safetensors")
    return folder


def test_a_custom_step_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written_step(tmp_path / "step", PAPER)
    assert main(["--grads", str(folder), "--", *STEP_FLAGS], "megatron-mtp prove") == 0
    said = capsys.readouterr().out
    assert said.startswith("Judged by eq. 21-25")
    assert f"right step of {folder} (packed documents)" in " ".join(said.split())
    written_step(folder, Rule(follow="buffer"))
    assert main(["--json", "--grads", str(folder), "--", *STEP_FLAGS], "megatron-mtp prove") == 1
    case = json.loads(capsys.readouterr().out)["cases"][0]
    assert (case["status"], case["cause"]) == ("WRONG", "documents that run into each other")


def test_names_of_transformer_engine_are_those_of_local_modules() -> None:
    given = {
        "module.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
        "decoder.layers.0.mlp.experts.linear_fc1.weight12": "mlp.experts.local_experts.12.linear_fc1.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_kv_up_proj.layer_norm_weight": (
            "self_attention.kv_layernorm.weight"
        ),
    }
    named = [*grads._named({f"weights.{name}": torch.ones(1) for name in given}, "weights")]
    assert [name.split(".", 3)[3].removeprefix("mtp_model_layer.") for name in named] == [*given.values()]


@pytest.mark.parametrize(
    ("change", "flags", "sentence"),
    [
        (lambda tensors: tensors.clear(), [], "has no microbatches.0.tokens"),
        (
            lambda tensors: tensors.pop("gradients.module.output_layer.weight"),
            [],
            "needs both a weight and a gradient",
        ),
        (lambda tensors: tensors.update(losses=torch.ones(3)), [], "losses does not have the shape [2]"),
        (lambda tensors: tensors.update({"microbatches.1.labels": torch.ones(1, 23)}), [], "are not all [rows, S]"),
        (None, ["--window-size", "128"], "cannot judge a step with --window-size"),
        (None, ["--bf16", "--num-experts", "8"], "cannot judge experts in BF16"),
        (None, ["--hybrid-layer-pattern", "M-*/*-"], "cannot judge a step with the layers of a hybrid"),
        (None, ["--hidden-dropout", "0.1"], "dropout"),
    ],
)
def test_a_step_that_cannot_be_judged_is_rejected(
    change: Callable[[dict[str, Tensor]], Any] | None,
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = written_step(tmp_path / "step", PAPER, *filter(None, [change]))
    assert main(["--grads", str(folder), "--", *STEP_FLAGS, *flags], "megatron-mtp prove") == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_step_with_unexpected_weights_has_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def extended(tensors: dict[str, Tensor]) -> None:
        tensors |= {"weights.adapter": torch.ones(3), "gradients.adapter": torch.ones(3)}

    folder = written_step(tmp_path / "step", PAPER, extended)
    assert main(["--grads", str(folder), "--", *STEP_FLAGS], "megatron-mtp prove") == 1
    assert "it has weights of its own (adapter)" in " ".join(capsys.readouterr().out.split())
    written_step(folder, PAPER)
    assert main(["--grads", str(folder), "--", *STEP_FLAGS, "--qk-layernorm", "--num-layers", "5"], "prove") == 1
    assert "the weights are not those of the flags ('decoder.layers.4" in " ".join(capsys.readouterr().out.split())


def test_a_script_must_exist_and_excludes_other_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        (["--script", str(tmp_path / "none.py"), "--", *FLAGS], "none.py is not a file; give your training script"),
        (["--script", __file__, "--all", "--", *FLAGS], "leave out --grads, --attached and --all"),
        (["--script", __file__, "--", "--hybrid-layer-pattern", "M-*/*-"], "--script judges GPT models"),
    ):
        assert main(arguments, "megatron-mtp prove") == 2
        assert sentence in capsys.readouterr().err


def test_a_script_gets_tiny_sizes_and_no_parallelism_flags() -> None:
    words = (
        "--num-layers 61 --num-experts 64 --moe-layer-freq ([0]*3+[1]*58) --mtp-num-layers 2 --lr 1 --swiglu".split()
    )
    flags = [*script._flags([*words, "--tensor-model-parallel-size", "8", "--bf16"], shrink(words))]
    pairs = dict(pairwise(flags))
    assert (pairs["--num-layers"], pairs["--num-experts"], pairs["--moe-layer-freq"]) == ("4", "4", "[0, 1, 1, 1]")
    assert "--swiglu" in flags
    assert not {"--lr", "--tensor-model-parallel-size", "--bf16"} & {*flags}


def test_a_folder_without_a_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--grads", str(tmp_path), "--", *STEP_FLAGS], "megatron-mtp prove") == 2
    assert "holds no *.safetensors" in capsys.readouterr().err
    (tmp_path / "step.safetensors").write_bytes(b"no tensors")
    assert main(["--grads", str(tmp_path), "--", *STEP_FLAGS], "megatron-mtp prove") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["--all", "--grads", str(tmp_path), "--", *STEP_FLAGS], "megatron-mtp prove") == 2
    assert "leave out --megatron, --attached and --all" in capsys.readouterr().err


# --- causes ----------------------------------------------------------------------------------------------------------


def told(tmp_path: Path, case: Case, weights: Weights, rule: Rule, **changes: Any) -> dict[str, Any]:
    """Return what ranks would report whose Megatron follows a rule."""
    batches = [Microbatch.of(batch_of(case.batch, number), case.layout.context) for number in range(case.microbatches)]
    model = Model(weights, TINY.config, TINY.model)
    found = expected(model, batches, case.per_token, rule)
    without = Model(weights, TINY.config | {"mtp_num_layers": 0}, TINY.model)
    trunk = expected(without, batches, case.per_token).gradients
    main = sum(float((values * mask).sum()) for (values, mask), *_ in map(model.losses, batches))
    control = {name: one for name, one in trunk.items() if not name.startswith("mtp.")}
    content = {
        "step": {"logged": found.logged, "gradients": found.gradients, "apart": {}},
        "control": {"logged": [], "main": [main], "gradients": control, "apart": {}},
        "weights": {name: one.detach() for name, one in weights.items()},
    }
    for part, values in changes.items():
        content[part] |= values
    torch.save(content, tmp_path / "case.pt")
    return {"case": 0, "file": str(tmp_path / "case.pt")}


def judged(event: dict[str, Any], case: Case, tiny: Tiny = TINY) -> Verdict:
    judge = Judge(tiny)
    return judge.with_causes([judge.verdict(case, event)])[0]


def test_correct_numbers_pass_in_every_kind_of_batch(tmp_path: Path) -> None:
    weights = weights_of(TINY)
    for case in (
        Case(ONE, "holes", True),
        Case(CP, "padded", False),
        Case(DP, "packed", True),
        Case(ONE, "unlabelled", False),
    ):
        assert judged(told(tmp_path, case, weights, PAPER), case).status == RIGHT


CAUSES: list[tuple[Case, Rule, str]] = [
    (Case(CP, "holes", False), Rule(divisor="ranks", shown="ranks"), "context-parallel ranks' own means"),
    (Case(CP, "packed", True), Rule(divisor="ranks", shown="ranks"), "context-parallel ranks' own means"),
    (Case(ONE, "padded", False), Rule(follow="true offsets"), "without padding"),
    (Case(ONE, "holes", False), Rule(masks="never"), "masks that are never shifted"),
    (Case(ONE, "holes", False), Rule(factor=2.0), "lambda were not divided"),
    (Case(ONE, "packed", False), Rule(follow="buffer"), "run into each other"),
    (Case(ONE, "holes", True), Rule(divisor="main"), "targets of the main loss"),
    (Case(ONE, "rows", False), Rule(detached=frozenset({"head"})), "no gradient to the output layer"),
    (Case(ONE, "rows", False), Rule(log_factor=3.0), "a log of 3 times"),
]


@pytest.mark.parametrize(("case", "rule", "words"), CAUSES, ids=[words for *_, words in CAUSES])
def test_the_cause_of_wrong_numbers_is_named(tmp_path: Path, case: Case, rule: Rule, words: str) -> None:
    verdict = judged(told(tmp_path, case, weights_of(TINY), rule), case)
    assert verdict.status == WRONG
    assert verdict.cause is not None
    assert words in verdict.cause.words


def test_a_missing_mtp_loss_is_reported(tmp_path: Path, proof: Proof) -> None:
    case = Case(ONE, "unlabelled", False)
    event = told(tmp_path, case, weights_of(TINY), Rule(factor=0.0), step={"logged": []})
    verdict = judged(event, case)
    assert verdict.cause is not None
    assert "no gradient reaches the MTP layers" in verdict.cause.words
    assert "no MTP loss is logged" in as_text(replace(proof, verdicts=[verdict]))


def test_attached_layers_divide_a_per_token_loss_by_the_targets_of_the_main_loss(tmp_path: Path) -> None:
    case, attached = Case(ONE, "holes", True), replace(TINY, attached=True)
    event = told(tmp_path, case, weights_of(TINY), Rule(divisor="main"))
    assert judged(event, case, attached).status == RIGHT
    assert judged(told(tmp_path, case, weights_of(TINY), PAPER), case, attached).status == WRONG


def test_a_bf16_case_has_its_own_bounds_and_the_float32_cause(tmp_path: Path, proof: Proof) -> None:
    weights, case = weights_of(TINY), Case(ONE, "holes", False)
    in_bf16 = replace(case, in_bf16=True)
    noise = torch.Generator().manual_seed(2)
    event = told(tmp_path, in_bf16, weights, PAPER)
    content = torch.load(event["file"], weights_only=True)
    for name, one in content["step"]["gradients"].items():
        content["step"]["gradients"][name] = one * (1 + 0.06 * torch.randn(one.shape, generator=noise))
    content["control"]["gradients"] = {name: 1.05 * one for name, one in content["control"]["gradients"].items()}
    torch.save(content, event["file"])
    judge = Judge(TINY)
    assert judge.verdict(case, told(tmp_path, case, weights, PAPER)).status == RIGHT
    torch.save(content, event["file"])
    assert judge.verdict(in_bf16, event).status == RIGHT
    torch.save(content, event["file"])
    assert judge.verdict(case, event).status == NOT_RUN
    rule = Rule(masks="never")
    found = [judge.verdict(one, told(tmp_path, one, weights, rule)) for one in (case, in_bf16)]
    verdicts = judge.with_causes(found)
    assert [verdict.status for verdict in verdicts] == [WRONG, WRONG]
    assert [verdict.cause and verdict.cause.words for verdict in verdicts] == ["masks that are never shifted"] * 2
    said = " ".join(as_text(replace(proof, verdicts=verdicts)).split())
    assert "WRONG 1 process (masked rows, masked rows in BF16)" in said
    assert "In BF16 within 10% of the norm of a gradient" in said


def test_wrong_numbers_without_a_known_cause_name_none(tmp_path: Path) -> None:
    case = Case(ONE, "holes", False)
    rule = Rule(masks="late", tokens="early", factor=0.7)
    verdict = judged(told(tmp_path, case, weights_of(TINY), rule), case)
    assert (verdict.status, verdict.cause) == (WRONG, None)


def test_different_copies_of_a_weight_are_wrong(tmp_path: Path) -> None:
    case, name = Case(ONE, "rows", False), "embedding.word_embeddings.weight"
    verdict = judged(told(tmp_path, case, weights_of(TINY), PAPER, step={"apart": {name: 0.5}}), case)
    assert (verdict.status, verdict.worst) == (WRONG, (name, 0.5))


def test_a_wrong_trunk_gives_no_verdict_on_mtp(tmp_path: Path) -> None:
    case, weights = Case(ONE, "rows", False), weights_of(TINY)
    event = told(tmp_path, case, weights, PAPER)
    content = torch.load(event["file"], weights_only=True)
    content["control"]["gradients"]["decoder.final_layernorm.weight"] *= 1.5
    torch.save(content, event["file"])
    verdict = judged(event, case)
    assert verdict.status == NOT_RUN
    assert "without MTP layers too (decoder.final_layernorm.weight by 50.0%)" in verdict.words


def test_a_model_that_the_equations_do_not_describe_is_compared_with_one_process(tmp_path: Path) -> None:
    weights, alone, two = weights_of(TINY), Case(ONE, "holes", False), Case(CP, "holes", False)
    judge = Judge(TINY)
    foreign = {"control": {"main": [1.0]}}
    base = judge.verdict(alone, told(tmp_path, alone, weights, PAPER, **foreign))
    assert (base.status, base.convention) == (BASE, "1 process")
    right = judge.verdict(two, told(tmp_path, two, weights, PAPER, **foreign))
    wrong = judge.verdict(two, told(tmp_path, two, weights, Rule(divisor="ranks", shown="ranks"), **foreign))
    replicas = replace(two, layout=DP)
    assert [right.status, wrong.status] == [RIGHT, WRONG]
    assert judge.verdict(replicas, told(tmp_path, replicas, weights, PAPER, **foreign)).status == NOT_RUN
    of_two = replace(alone, replicas=2)
    assert judge.verdict(of_two, told(tmp_path, of_two, weights, PAPER, **foreign)).status == BASE
    assert judge.verdict(replicas, told(tmp_path, replicas, weights, PAPER, **foreign)).status == RIGHT
    event = told(tmp_path, two, weights, PAPER, **foreign)
    content = torch.load(event["file"], weights_only=True)
    content["control"]["gradients"]["decoder.final_layernorm.weight"] *= 1.5
    torch.save(content, event["file"])
    assert "without MTP layers too" in judge.verdict(two, event).words


def test_every_cause_changes_the_numbers_of_its_case() -> None:
    """No altered rule gives the paper's numbers in its own case; otherwise it would explain nothing."""
    case, weights = Case(CP, "padded", False), weights_of(TINY)
    model = Model(weights, TINY.config, TINY.model)
    batches = [Microbatch.of(batch_of(case.batch, number), 2) for number in range(MICROBATCHES)]
    right = expected(model, batches, False)
    for hypothesis in hypotheses(case, TINY):
        bent = expected(model, batches, False, hypothesis.rule)
        same = all(torch.allclose(bent.gradients[name], one, rtol=1e-6) for name, one in right.gradients.items())
        assert not (same and bent.logged == pytest.approx(right.logged, rel=1e-6)), hypothesis.words


# --- failing ranks, and the output ------------------------------------------------------------------------------------


def test_a_hanging_rank_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "at-1").write_text("7")
    stack = 'Thread 0x1 (most recent call first):\n  File "/x/torch/distributed.py", line 4 in wait\n'
    stack += '  File "/x/megatron/core/transformer/multi_token_prediction.py", line 205 in roll_tensor\n'
    (tmp_path / "stack-1").write_text(stack)
    assert worker.reason(tmp_path, [1]) == (
        7,
        "rank 1 hangs in roll_tensor (multi_token_prediction.py:205) and was ended",
    )


def test_a_crash_is_wrong_but_a_megatron_error_is_not() -> None:
    case = Case(CP, "padded", False)
    failed = "rank 0: IndexError: list index out of range (multi_token_prediction.py:315)"
    refused = judged({"case": 0, "failed": "rank 1: ValueError: not with experts (moe.py:6)", "in": "step"}, case)
    unbuilt = judged({"case": 0, "failed": "rank 0: TypeError: no field", "in": ""}, case)
    bare = judged({"case": 0, "failed": "rank 0: RuntimeError: in place (mlp.py:354)", "in": "control"}, case)
    crashed = judged({"case": 0, "failed": failed, "in": "step"}, case)
    assert [one.status for one in (refused, unbuilt, bare, crashed)] == [NOT_RUN, NOT_RUN, NOT_RUN, WRONG]
    assert bare.words == "it fails without MTP layers too: rank 0: RuntimeError: in place (mlp.py:354)"
    assert refused.words == "Megatron refuses it: not with experts (moe.py:6)"
    assert crashed.cause is not None
    assert crashed.cause.known == (4495, 6205)


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    tmp_path = tmp_path_factory.mktemp("proof")
    weights, case = weights_of(TINY), Case(CP, "holes", False)
    source = tmp_path / "site/megatron/core/transformer/multi_token_prediction.py"
    source.parent.mkdir(parents=True)
    source.write_text("import torch\n\n            safe_num_tokens = num_tokens.clamp(min=1)\n")
    wrong = judged(told(tmp_path, case, weights, Rule(divisor="ranks", shown="ranks")), case)
    alone = Case(ONE, "holes", False)
    right = judged(told(tmp_path, alone, weights, PAPER), alone)
    return Proof("0.19.2", source, TINY, [right, wrong], {"norms": "why"}, {"EP 2": "the flags have no experts"})


WAYS: list[Callable[[Proof], str]] = [as_text, as_page, lambda proof: json.dumps(as_json(proof))]


@pytest.mark.parametrize("way", WAYS, ids=["text", "page", "json"])
def test_a_wrong_case_is_reported_with_place_and_issue(proof: Proof, way: Callable[[Proof], str]) -> None:
    said = " ".join(way(proof).split())
    for words in ("CP 2, masked rows", "multi_token_prediction.py:3", "NVIDIA/Megatron-LM#7498"):
        assert words in said
    assert not proof.is_right


def test_the_text_lists_cases_that_were_not_run(proof: Proof) -> None:
    lines = as_text(proof).splitlines()
    assert "right   1 process (masked rows)" in lines
    assert "not run EP 2: the flags have no experts" in lines
    assert max(map(len, lines)) <= 120
