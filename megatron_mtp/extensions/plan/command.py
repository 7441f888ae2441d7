"""`megatron-mtp plan`: computes memory, time and a placement from a launch line, a GPU and the number of GPUs.

`train --dry-run` calls `of_job` through the table of verbs.
"""

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from megatron_mtp.common.command import check_counts, from_extra, named, status_of
from megatron_mtp.common.errors import Parser
from megatron_mtp.common.files import write_page

if TYPE_CHECKING:
    from megatron_mtp.extensions.plan.hardware import Card
    from megatron_mtp.extensions.plan.planning import Plan
    from megatron_mtp.extensions.plan.report import Drafting

EXAMPLES = """examples:
  # $FLAGS are the flags of your launch line; the recommended ones are printed
  megatron-mtp plan --gpu H100 --gpus 1024 -- $FLAGS

  # model sizes from a Hugging Face folder, layout and batch from the launch line
  megatron-mtp plan --gpu H200 --gpus 64 --model models/GLM-4.5-Air -- --bf16 --pipeline-model-parallel-size 4 \\
      --expert-model-parallel-size 8 --seq-length 8192 --global-batch-size 256 --use-distributed-optimizer

  # a cluster with a slower network, and a custom GPU
  megatron-mtp plan --gpu H100,network=25 --gpus 256 -- $FLAGS
  megatron-mtp plan --gpu bf16=300,memory=64,bandwidth=1600,link=200,network=25 --gpus 16 -- $FLAGS

  # what MTP layers add to a step that takes 2.09 s without them
  megatron-mtp plan --gpu H100 --gpus 8 --step-seconds 2.09 -- $FLAGS

  # with the predicted drafting speed, and an HTML page
  megatron-mtp plan --gpu H200 --gpus 64 --accepted runs/mine/checkpoint --output plan.html -- $FLAGS
"""


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        usage=f"{program} --gpu NAME --gpus N [--model FOLDER] [...] -- LAUNCH LINE",
        description="Plan a run with MTP layers before you pay for it: memory per pipeline stage, step time by part, "
        "placements of 0 to 4 MTP layers, and launch flags for the fastest that fits. Figures are computed, not "
        "measured; docs/extensions/plan.md compares them with measurements.",
        epilog=EXAMPLES,
    )
    add = made.add_argument
    add("--gpu", required=True, metavar="NAME", help="H100, H200, B200, MI300X, one with changes "
        "(H100,network=25), your own figures (TFLOP/s, GB, GB/s), or 'here' to measure this CPU")  # fmt: skip
    add("--gpus", type=int, required=True, metavar="N", help="number of GPUs")
    add("--model", type=named, metavar="FOLDER", help="Hugging Face folder to read the model's sizes from")
    add("--depths", type=int, metavar="D", help="number of MTP layers; default: that of the launch line, or 1")
    seconds = "measured step time without MTP layers; scales everything but output layer and losses"
    add("--step-seconds", type=float, metavar="S", help=seconds)
    add(
        "--accepted",
        metavar="RATES",
        help="also predict drafting speed: folder or file with mtp_acceptance.json, rates such as 0.83,0.65, "
        "or published ones (deepseek, glm, glm4, qwen)",
    )
    add(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 8, 32, 128],
        metavar="B",
        help="batch sizes when decoding; default: 1 8 32 128",
    )
    add("--serving-gpus", type=int, default=8, metavar="N", help="GPUs per model when decoding; default: 8")
    add("--weight-bytes", type=float, default=2.0, metavar="B", help="bytes per weight when decoding; default: 2")
    add("--context", type=int, default=1024, metavar="N", help="tokens per request in the KV cache; default: 1024")
    add("--forward-ms", type=float, metavar="MS", help="measured forward pass for one request without drafts")
    add("--output", type=named, metavar="FILE", help="also write an HTML page with charts (needs plotly)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("line", nargs="*", metavar="FLAG", help="the launch line, after --")
    return made


def main(arguments: list[str], program: str) -> int:
    """Print the plan. Bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_with_line(arguments)
    return status_of(program, lambda: _print(args))


def of_job(argv: list[str], ranks: int) -> str:
    """Return the output of `train --dry-run`; see `dry_run.plan`."""
    from megatron_mtp.extensions.plan.dry_run import plan

    return plan(argv, ranks)


def _print(args: Namespace) -> int:
    from megatron_mtp.extensions.plan.decoding import DraftDecoder, accepted_of
    from megatron_mtp.extensions.plan.hardware import card_of
    from megatron_mtp.extensions.plan.launch import of_folder
    from megatron_mtp.extensions.plan.planning import plan
    from megatron_mtp.extensions.plan.report import Drafting, as_json, as_text

    _check(args)
    if not args.line and args.model is None:
        raise ValueError("there is no launch line; give its flags behind --, or a folder with --model.")
    words = [*(of_folder(args.model) if args.model is not None else []), *args.line]
    card = _card_here(words) if args.gpu == "here" else card_of(args.gpu)
    made = plan(words, card, args.gpus, args.depths, args.step_seconds)
    drafting = None
    if args.accepted is not None:
        forward = None if args.forward_ms is None else args.forward_ms / 1000
        decoder = DraftDecoder(made.model, card, args.serving_gpus, args.weight_bytes, args.context, forward)
        drafting = Drafting(decoder, accepted_of(args.accepted), tuple(args.batches))
    print(json.dumps(as_json(made, drafting)) if args.json else as_text(made, drafting), flush=True)
    if args.output is not None:
        _write_page(args, made, drafting)
    return 0


def _card_here(words: list[str]) -> "Card":
    from megatron_mtp.extensions.plan.here import card_here
    from megatron_mtp.extensions.plan.launch import read
    from megatron_mtp.extensions.plan.sizes import model_of

    return card_here(model_of(read(words)))


def _write_page(args: Namespace, made: "Plan", drafting: "Drafting | None") -> None:
    with from_extra("report", "the page", "plotly"):
        from megatron_mtp.extensions.plan.picture import page
    write_page(args.output, page(made, drafting), "--output")


def _check(args: Namespace) -> None:
    """Raise ValueError for a number that is out of range."""
    check_counts(args, "gpus", "serving_gpus", "context")
    if args.depths is not None and args.depths < 0:
        raise ValueError(f"--depths is {args.depths}; give 0 or more.")
    for name in ("step_seconds", "forward_ms", "weight_bytes"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e9:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give a number above 0.")
    if any(batch < 1 for batch in args.batches):
        raise ValueError(f"--batches has {min(args.batches)}; give 1 or more.")
