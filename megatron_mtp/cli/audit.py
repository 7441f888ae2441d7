"""`megatron-mtp audit A [B]`: describe a checkpoint, or decide whether two are the same model.

Exit status 0: sound, or equal. 1: findings that are more than notes. 2: invalid input.
"""

import json
import sys
from argparse import Namespace
from functools import partial
from typing import Any

from megatron_mtp.common.command import named, status_of
from megatron_mtp.common.errors import Parser

FOUND = 1
"""Exit status if there are findings."""

EXAMPLES = """examples:
  # what a folder holds: trunk, MTP layers, copies, data types; does its config match its files
  megatron-mtp audit models/GLM-4.5-Air

  # what an export lost or changed: a folder against its checkpoint
  megatron-mtp audit runs/quickstart/checkpoint runs/quickstart/exported

  # compare their logits as well
  megatron-mtp audit exported runs/mine/checkpoint --logits --text held_out/a.txt

  # in a script: status 0 if both are equal, 1 if not, 2 if one is not a model
  megatron-mtp audit models/mine exported --json > audit.json
"""


def main(arguments: list[str], program: str) -> int:
    """Run the audit. Invalid input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    return status_of(program, lambda: run(args))


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="Describe any Hugging Face folder or Megatron checkpoint, or explain how two differ, with advice "
        "for each finding. Each tensor is read once, and pickles are never run. Exit status: 0 sound or equal, 1 "
        "findings, 2 bad input.",
        epilog=EXAMPLES,
    )
    add = made.add_argument
    add(
        "a",
        type=named,
        metavar="A",
        help="Hugging Face folder of a model or drafter, name on the Hub, or Megatron checkpoint",
    )
    add("b", type=named, metavar="B", nargs="?", help="folder or checkpoint to compare with A")
    add("--logits", action="store_true", help="also compare the logits of a folder and a checkpoint, as verify does")
    add("--text", type=named, metavar="FILE", help="with --logits: use this text instead of random tokens")
    add("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer folder")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    return made


def run(args: Namespace) -> int:
    """Audit, print and return the exit status. Raise ValueError if a path is not a model or a flag is wrong."""
    if args.text is not None and not args.logits:
        raise ValueError(f"--text is {args.text}, whose tokens only --logits reads; add --logits, or leave --text out.")
    if args.text is not None and not args.text.is_file():
        raise ValueError(f"--text is {args.text}, which is not a file; give a text.")

    from megatron_mtp.checkpoint.hf.hub import local_folder
    from megatron_mtp.megatron.runtime import quieten

    quieten()

    from megatron_mtp.checkpoint.audit.auditing import audit

    computed = None
    if args.logits:
        from megatron_mtp.checkpoint.verify.verify import same_logits

        computed = partial(same_logits, text=args.text, trust_remote_code=args.trust_remote_code)
    result = audit(
        local_folder(args.a),
        None if args.b is None else local_folder(args.b),
        run=computed,
        quiet=args.json or not sys.stderr.isatty(),
    )
    print(json.dumps(result) if args.json else text_of(result), flush=True)
    return 0 if result["ok"] else FOUND


def text_of(result: dict[str, Any]) -> str:
    """Format the result as text: each side, the findings, and the verdict."""
    lines = [line for side in result["sides"] for line in _side(side)]
    for finding in result["findings"]:
        where = f" of {finding['side']}" if finding["side"] and len(result["sides"]) > 1 else ""
        lines.append(f"{finding['severity']:<8} {finding['guess']}{where}: {finding['says']}")
        lines += [f"         To do: {finding['advice']}."] if finding["advice"] else []
    lines += [f"logits   {check['name']}: {check['figure']:.3g}" for check in result.get("logits", ())]
    return "\n".join([*lines, verdict(result)])


def _side(side: dict[str, Any]) -> list[str]:
    kind = side.get("model") or side.get("drafter") or side.get("model_type") or "no model_type"
    counts = " and ".join(f"{part} {_count(side[part])}" for part in ("layers", "depths")) + "; "
    drafter = ""
    if side.get("drafter"):
        counts, drafter = ("", "") if kind == side["drafter"] else (counts, f", drafter {side['drafter']}")
    types = ", ".join(f"{count} {name}" for name, count in side["types"].items()) or "no tensors"
    quantized = f", quant_method {side['quant_method']}" if side.get("quant_method") else ""
    pattern = f", pattern {side['hybrid layer pattern']}" if side.get("hybrid layer pattern") else ""
    copies = f", {side['copies']} of them copies" if side["copies"] else ""
    return [
        f"{side['side']}  {side['path']}: {side['form']}, {kind}{drafter}{pattern}{quantized}",
        f"   {counts}{side['tensors']} tensors{copies}, {_size(side['bytes'])} ({types})",
        *([f"   drafts: {_drafts(side['drafts'])}"] if side.get("drafts") else []),
    ]


def _drafts(found: dict[str, Any]) -> str:
    """Return `MTP, by 'num_nextn_predict_layers'; embedding half first; fed after the final norm`."""
    key = f", by '{found['key']}'" if found["key"] else ""
    if "stages" in found:
        block = found["block"] or "not in the config"
        return f"{found['kind']}, stages {found['stages']}, block {block}{key}; no MTP layers"
    if "halves" not in found:
        return f"{found['kind']}{key}"
    first, later = found["fed"]
    fed = f"fed {first} the final norm" + ("" if first == later else f", later MTP layers {later} their norm")
    return f"{found['kind']}{key}; {found['halves']}; {fed}"


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def _count(found: dict[str, Any]) -> str:
    """Return `3`, or both counts if config and files differ."""
    if found["config"] is None or found["config"] == found["files"]:
        return str(found["files"])
    return f"{found['files']} (config: {found['config']})"


def verdict(result: dict[str, Any]) -> str:
    """Return the last line: sound, equal, or the number of findings."""
    counts = {kind: sum(one["severity"] == kind for one in result["findings"]) for kind in ("error", "warning")}
    equal = f"{result['compared']['equal']} tensors are equal bit by bit; " if "compared" in result else ""
    if result["ok"]:
        return f"{equal}{'nothing that matters differs' if equal else 'sound: nothing is missing, damaged or stale'}."
    return f"{equal}{counts['error']} error(s) and {counts['warning']} warning(s)."
