"""How runs were started: date, command, versions and hyperparameters, from run.json."""

import json
import shlex
from html import escape
from typing import Any

from megatron_mtp.report.panels import scrolled
from megatron_mtp.report.runs import Run

GROUPS = {
    "Model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups multi_latent_attention "
    "num_experts moe_router_topk padded_vocab_size seq_length position_embedding_type rotary_base normalization",
    "Depths": "mtp_num_layers mtp_loss_scaling_factor mtp_loss mtp_architecture mtp_use_repeated_layer mtp_unroll "
    "mtp_repeated_layer_shares_kv mtp_detach_heads mtp_train_only mtp_init mtp_draft_vocab_size",
    "Optimization": "optimizer lr min_lr lr_decay_style lr_warmup_iters train_iters global_batch_size "
    "micro_batch_size weight_decay adam_beta1 adam_beta2 clip_grad attention_dropout hidden_dropout params_dtype seed",
    "Layout": "world_size data_parallel_size tensor_model_parallel_size sequence_parallel "
    "pipeline_model_parallel_size context_parallel_size expert_model_parallel_size",
    "Data": "data_path split tokenizer_model load save",
}
"""The arguments that the page shows for every run; with several runs, all others that differ follow."""

OF_A_PROCESS = {"rank", "local_rank", "mtp_metrics_dir", "tensorboard_dir", "save", "wandb_save_dir"}
"""Arguments whose differences do not matter."""


def section(runs: list[Run]) -> str:
    """A table of hyperparameters with a column a run, and the commands."""
    known = [run for run in runs if run.started is not None]
    if not known:
        return "<p>No run has a run.json, which runs of earlier versions did not write.</p>"
    heads = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in known)
    body = "".join(_group(title, names.split(), known) for title, names in GROUPS.items())
    others = _differing(known)
    body += _group("Other settings that differ", others, known) if others else ""
    table = (
        f'<table class="settings"><caption>Hyperparameters</caption><tr><th scope="col">argument</th>{heads}</tr>'
        f"{_dates(known)}{body}</table>"
    )
    return scrolled("hyperparameters", table) + "".join(_command(run) for run in known)


def _dates(runs: list[Run]) -> str:
    """Dates of the first start and of resumptions, and versions of packages."""
    starts = [_starts(run) for run in runs]
    rows = [_row("first started", [_date(of[0]) for of in starts])]
    if any(len(of) > 1 for of in starts):
        rows.append(_row("resumed", [_resumed(of) for of in starts]))
    packages = dict.fromkeys(name for of in starts for name in of[-1]["versions"])
    rows += [_row(name, [str(of[-1]["versions"].get(name, "")) for of in starts]) for name in packages]
    return "".join(rows)


def _resumed(starts: list[dict[str, Any]]) -> str:
    return ", ".join(f"{_date(start)} at step {start['iteration']}" for start in starts[1:])


def _date(start: dict[str, Any]) -> str:
    return str(start["date"]).replace("T", " ")


def _starts(run: Run) -> list[dict[str, Any]]:
    assert run.started is not None
    starts: list[dict[str, Any]] = run.started["starts"]
    return starts


def _group(title: str, names: list[str], runs: list[Run]) -> str:
    """Arguments for which a run has a value; those that differ between runs are marked."""
    rows = []
    for name in names:
        values = [_argument(run, name) for run in runs]
        if any(value is not None for value in values):
            shown = ["" if value is None else _shown(value) for value in values]
            rows.append(_row(name.replace("_", " "), shown, differs=len(set(shown)) > 1))
    head = f'<tr><th scope="rowgroup" colspan="{len(runs) + 1}">{escape(title)}</th></tr>'
    return f"{head}{''.join(rows)}" if rows else ""


def _argument(run: Run, name: str) -> Any:
    assert run.started is not None
    return run.started["arguments"].get(name)


def _differing(runs: list[Run]) -> list[str]:
    """Arguments in no group whose values differ between runs."""
    grouped = {name for names in GROUPS.values() for name in names.split()} | OF_A_PROCESS
    names = dict.fromkeys(name for run in runs for name in (run.started or {})["arguments"])
    return [name for name in names if name not in grouped and len({_shown(_argument(run, name)) for run in runs}) > 1]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _row(name: str, cells: list[str], differs: bool = False) -> str:
    kind = ' class="differs"' if differs else ""
    return f'<tr{kind}><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'


def _command(run: Run) -> str:
    """Of the newest start."""
    words = escape(shlex.join(_starts(run)[-1]["command"]))
    return f'<figure><figcaption>{escape(run.name)}: command</figcaption><pre class="command">{words}</pre></figure>'
