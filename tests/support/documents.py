"""Parse the pages: fenced blocks, inline code, and the commands in both."""

import ast
import re
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in PAGES}
SHELLS = ("sh", "bash")
DOORS = {
    "pretrain_gpt.py": "train",
    "generate_gpt.py": "generate",
    "tools/checkpoint/convert.py": "convert",
    "tools/data/preprocess.py": "preprocess",
}
"""Scripts that run a verb of `megatron-mtp`."""

ENGINES = {
    "sbatch": "--nodes --gpus-per-node --exclusive --time --mem --array --signal --requeue --partition --parsable "
    "--dependency",
    "docker": "--build-arg --tag --rm --init --user --volume --gpus --entrypoint --nproc-per-node",
    "llama-server": "--model --spec-type --spec-draft-n-max --spec-draft-p-min",
    "scancel": "--signal",
    "srun": "--kill-on-bad-exit",
    "python convert_trained.py": "--outtype --outfile",
    "pip wheel": "--no-deps --no-build-isolation",
    "python -m pip download": "--constraint --dest",
    "python -m pip install": "--no-index --find-links --target",
    "--only-binary": "--only-binary --python-version --platform",
    "guidellm run": "--backend --tokenizer --data --profile --constraint --output",
    "vllm serve": "--speculative-config --trust-remote-code",
    "python -m sglang.launch_server": "--model-path --speculative-algorithm --speculative-num-steps "
    "--speculative-eagle-topk --speculative-num-draft-tokens --speculative-draft-model-path --trust-remote-code "
    "--speculative-token-map",
}
"""Flags of programs that are not installed here, taken from their documentation."""
INSIDE = {"docker": " megatron-mtp ", "sbatch": ".sbatch "}
"""Where an engine's own flags end: what follows the image, or the job's script, belongs to the program inside."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*(?![-\w*])")


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """Return language and text of fenced blocks in one of these languages."""
    return [(language, body) for language, body in FENCE.findall(text) if language in languages]


def spans(text: str) -> list[str]:
    """Return inline code of sentences and tables."""
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text))]


def strings(source: str, filled: str = "X") -> Iterator[tuple[int, str]]:
    """Yield line and text of every string except docstrings. Values inside an f-string become `filled`."""
    nodes = [*ast.walk(ast.parse(source))]
    beside = {id(one) for node in nodes if isinstance(node, ast.JoinedStr) for one in node.values}
    beside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(one.value) if isinstance(one, ast.Constant) else filled for one in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in beside:
            yield node.lineno, node.value


def flags_in(text: str) -> list[str]:
    """Return every `--flag` in a text, except `--mtp-*`, which stands for several."""
    return _FLAG.findall(text)


def parse(program: str, *arguments: str) -> None:
    """Parse as the program would: invalid arguments end with its own message and status 2."""
    if _check_engine(" ".join((program, *arguments))):
        sys.exit(0)
    if program == "torchrun":
        given = launcher().parse_args(arguments)
        module = ["-m"] * given.module
        return parse("python", *module, given.training_script, *given.training_script_args)
    if program == "python" and arguments[:2] == ("-m", "megatron_mtp"):
        program, arguments = "megatron-mtp", arguments[2:]
    if program == "python" and not Path(arguments[0]).is_file():
        sys.exit(f"{arguments[0]} is not there")
    verb, rest = arguments[0], arguments[1:]
    parser_of(DOORS.get(verb, verb)).parse_args(rest)


def _check_engine(written: str) -> bool:
    """Return whether it is the command of an engine. Exit with status 1 if it has a flag that was not looked up."""
    engine = next((engine for engine in ENGINES if written.startswith(engine)), None)
    own = written.partition(INSIDE[engine])[0] if engine in INSIDE else written
    if engine is not None and (unknown := set(flags_in(own)) - set(ENGINES[engine].split())):
        sys.exit(f"{engine}: not among the flags that were looked up: {unknown}")
    return engine is not None


@cache
def launcher() -> ArgumentParser:
    """Return torchrun's parser."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


PASSES_ON = ("attach", "evaluate")
"""Verbs that pass unknown flags on to `train`."""


@cache
def parser_of(verb: str) -> ArgumentParser:
    """Return a parser with all flags of a `megatron-mtp` command, including flags passed on to `train`."""
    from megatron_mtp.cli import verbs

    if verb not in verbs.VERBS:
        sys.exit(f"megatron-mtp has no verb '{verb}'")
    module = verbs.module_of(verb)
    made: ArgumentParser = getattr(module, "full_parser", module.parser)(f"megatron-mtp {verb}")
    if verb not in PASSES_ON:
        return made
    parents = [verbs.module_of("train").full_parser("megatron-mtp"), made]  # parsers that this one takes flags from
    return ArgumentParser(made.prog, parents=parents, add_help=False, conflict_handler="resolve")


@cache
def commands() -> dict[str, frozenset[str]]:
    """Return the flags of every verb, and of every command of `convert`."""
    from megatron_mtp.cli.verbs import VERBS

    verbs = {verb: frozenset(_flags(parser_of(verb))) for verb in VERBS}
    (converting,) = _subparsers(parser_of("convert"))
    return verbs | {name: frozenset(_flags(parser)) for name, parser in converting.items()}


def _flags(parser: ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
    for children in _subparsers(parser):
        for child in children.values():
            yield from _flags(child)


def _subparsers(parser: ArgumentParser) -> Iterator[dict[str, ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            yield action.choices
