"""`megatron-mtp tabulate`: checkpoints and a text in; a table of acceptance out, row by row."""

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_mtp.drafting.config import MOST_DRAFTED
from megatron_mtp.errors import check_counts, status_of
from megatron_mtp.files import check_outside
from megatron_mtp.foretell.table.measuring import measure
from megatron_mtp.foretell.table.rows import Asked, all_rows, digest_of, file_of, keep, kept
from megatron_mtp.foretell.table.shown import text_of

INCOMPLETE = 1
"""Exit status where a checkpoint has no row."""


def main(args: Namespace, program: str) -> int:
    """Fill the table; bad flags end with one sentence and exit status 2."""
    return status_of(program, lambda: tabulate(args, program), advice="the same command continues")


def tabulate(args: Namespace, program: str) -> int:
    """Make the rows that are not there, and show all; returns the exit status.

    Raises:
        ValueError: a flag is out of range, or there is no text.
    """
    _check(args)
    failed = []
    wanted = list(product(args.checkpoints, args.num_speculative_tokens or [None]))
    digest = digest_of(args.text)
    with tqdm(desc="acceptance", total=len(wanted) * args.prompts, unit="prompt", disable=None) as bar:
        for number, (checkpoint, drafts) in enumerate(wanted, start=1):
            try:
                _fill(_asked(args, checkpoint, drafts, digest), args, bar)
            except (ValueError, OSError) as error:
                reason = " ".join(str(error).split())
                failed.append({"checkpoint": checkpoint, "reason": reason})
                tqdm.write(f"{program}: {checkpoint}: {reason}", file=sys.stderr)
            bar.update(number * args.prompts - bar.n)
    rows = all_rows(args.output)
    result = {"rows": rows, "failed": failed, "ok": not failed}
    if args.html is not None:
        _write_page(result, args)
    print(json.dumps(result) if args.json else text_of(rows, failed), flush=True)
    return INCOMPLETE if failed else 0


def _check(args: Namespace) -> None:
    """Raises ValueError for a number out of range, an empty name, or an output inside a checkpoint."""
    check_counts(args, "prompts", "prompt_tokens", "new_tokens")
    if "" in args.checkpoints:
        raise ValueError("a CKPT is empty; give a checkpoint or a folder.")
    for count in args.num_speculative_tokens or ():
        if not 1 <= count <= MOST_DRAFTED:
            raise ValueError(f"--num-speculative-tokens is {count}; give 1 to {MOST_DRAFTED}.")
    for output in filter(None, (args.output, args.html)):
        check_outside(output, *map(Path, args.checkpoints))


def _asked(args: Namespace, checkpoint: str, drafts: int | None, digest: str) -> Asked:
    return Asked(
        checkpoint,
        drafts,
        tuple(args.engine),
        tuple(args.text),
        digest,
        args.prompts,
        args.prompt_tokens,
        args.new_tokens,
        args.tokenizer,
        args.trust_remote_code,
    )


def _fill(asked: Asked, args: Namespace, bar: Any) -> None:
    """Make and keep a row, unless it is there."""
    file = file_of(args.output, asked.settings())
    if kept(file) is not None:
        return
    with redirect_stdout(sys.stderr):  # what libraries print is no part of the answer
        row = measure(asked, bar.update)
    keep(file, row)


def _write_page(result: dict[str, Any], args: Namespace) -> None:
    from megatron_mtp.report.page import write_page
    from megatron_mtp.report.tabulated import page

    write_page(page(result), args.html, flag="--html")
