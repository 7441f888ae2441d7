"""What only a CUDA device can show, in less than eight minutes: every part runs, fails, or reports why it does not run.

    scripts/gpu_check.sh                                  on a CUDA device; writes docs/gpu.md
    python benchmarks/gpu_check.py --parts drafting       one part, of those that `gpu_parts.PARTS` lists
    python benchmarks/gpu_check.py --device cpu --quick   does it run? (the figures mean nothing; no page)

Ends with status 0 if every part ran and met its goals, 1 if not, and 77, which test runners take for "skipped", without
a CUDA device. As every benchmark it prints one JSON object in its last line (`harness.report`).
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

if TYPE_CHECKING:
    from benchmarks.gpu_parts import Found
    from benchmarks.harness import Goal

SECONDS = 460
"""For all parts; what has not begun by then does not."""
PAGE = Path("docs/gpu.md")
SKIPPED = 77


def main() -> int:
    """Run the parts, print the report, and write the page of a run on a GPU."""
    args = parse(sys.argv[1:])
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_check: skipped, since there is no CUDA device here; --device cpu --quick tries its parts on the CPU."
        )
        return SKIPPED
    from benchmarks.gpu_parts import ON_CPU, PARTS
    from benchmarks.harness import hardware, report, table
    from megatron_mtp.errors import fail

    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        fail("gpu_check", f"--parts names {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    found, not_run = run_parts(args.parts or list(PARTS), args.quick)
    goals = [goal for each in found.values() for goal in each.goals]
    results: dict[str, Any] = {name: each.results for name, each in found.items()} | {"not run": not_run}
    machine = hardware(ON_CPU)
    tables = [f"{one.title}\n{table(one.header, one.rows)}" for each in found.values() for one in each.tables]
    report(
        "gpu_check", machine, results, goals, [*tables, *(f"not run: {part}: {why}" for part, why in not_run.items())]
    )
    if not ON_CPU:
        write_page(PAGE, page(machine, list(found.values()), goals, not_run))
    failed = any("error" in each.results for each in found.values())
    return int(failed or not all(goal.met for goal in goals))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", default=[], metavar="PART", help="default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    return parser.parse_args(argv)


def run_parts(names: list[str], quick: bool) -> tuple[dict[str, "Found"], dict[str, str]]:
    """What each part found, and why others did not run; one that fails does not keep the next from running."""
    from benchmarks.gpu_parts import PARTS, Found, NotRunError, Setting, forget

    found: dict[str, Found] = {}
    not_run: dict[str, str] = {}
    deadline = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            left = deadline - time.monotonic()
            print(f"gpu_check: {name}, {left:.0f} s left", file=sys.stderr, flush=True)
            if left <= 0:
                not_run[name] = f"the {SECONDS} s were over"
                continue
            try:
                found[name] = PARTS[name](Setting(quick, Path(folder), deadline))
                not_run |= {f"{name}: {part}": why for part, why in found[name].not_run.items()}
            except NotRunError as why:
                not_run[name] = str(why)
            except Exception as error:  # whatever a device has to say
                traceback.print_exc()
                found[name] = Found({"error": f"{type(error).__name__}: {error}"[:500]})
            forget()
    return found, not_run


def page(machine: dict[str, Any], found: "list[Found]", goals: "list[Goal]", not_run: dict[str, str]) -> str:
    """The page as Markdown."""
    from benchmarks.harness import versions

    lines = [
        "# On a GPU",
        "",
        "Written by `scripts/gpu_check.sh`; every figure is of the one run that this page is from.",
    ]
    lines += ["", *(f"- {name}: {value}" for name, value in (machine | versions()).items())]
    for each in found:
        for one in each.tables:
            lines += ["", f"## {one.title}", "", *markdown(one.header, one.rows)]
        if "error" in each.results:
            lines += ["", f"Failed: {each.results['error']}"]
    rows = [(goal.what, goal.value, f"{goal.op} {goal.goal}", "yes" if goal.met else "no") for goal in goals]
    lines += ["", "## Goals", "", *markdown(("goal", "measured", "wanted", "met"), rows)]
    if not_run:
        lines += ["", "## Not run", "", *(f"- {part}: {why}" for part, why in not_run.items())]
    return "\n".join(lines) + "\n"


def markdown(header: Any, rows: Any) -> list[str]:
    """A table; floats with four digits that count."""
    cells = [
        ["-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in r] for r in rows
    ]
    return ["| " + " | ".join(row) + " |" for row in (list(header), ["---"] * len(header), *cells)]


def write_page(target: Path, text: str) -> None:
    """Beside and renamed."""
    beside = target.with_name(f"{target.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(target)


if __name__ == "__main__":
    sys.exit(main())
