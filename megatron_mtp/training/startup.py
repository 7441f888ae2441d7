"""Startup errors of a run: one sentence on stderr, exit status 2, and the traceback in a log file.

    with explained("pretrain_gpt.py"):                            while flags are read and checked
    with explained("pretrain_gpt.py", metrics.has_trained):       while Megatron trains

Any exception before the second training step becomes one sentence: what was being done, the message, and the flags,
with values, that the message or the failing line of Megatron's source names. After that, an exception is a bug and
keeps its traceback on the terminal, except for a NaN loss and a checkpoint that cannot be saved.

Our own checks raise a ValueError that is a complete sentence and is shown as it is.
"""

import linecache
import re
import shutil
import traceback
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_mtp.common.errors import INTERRUPTED, REFUSED, UNREAD, InputError, sentence_of_the_machine, sentences
from megatron_mtp.megatron.checkpoint.damage import root_of
from megatron_mtp.megatron.refusals import ADVICE, DIVERGED, NAMES_ELSEWHERE, PHASES, SENTENCES
from megatron_mtp.training.flags import all_parser
from megatron_mtp.training.short_log import keep_traceback, last_words

PACKAGE = Path(__file__).parents[1]

MOST_NAMED, FARTHEST = 4, 8
"""Limits of a useful message: a line that names more flags, and outer callers, do not explain the mistake."""


@contextmanager
def explained(program: str, has_started: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Exit with one sentence if the enclosed code fails before the run has started."""
    with sentences(program, mistakes=InputError):
        try:
            yield
        except SystemExit as end:
            if end.code in (0, REFUSED, INTERRUPTED, UNREAD) or has_started():
                raise
            words = last_words()
            raise InputError(f"Megatron ends here: {words}; its log is {keep_traceback(end)}.") from None
        except (KeyboardInterrupt, BrokenPipeError, InputError, GeneratorExit):
            raise
        except BaseException as error:  # torch's CheckpointException is not an Exception
            if (said := _sentence(program, error, has_started())) is None:
                raise
            raise InputError(said) from error


def _sentence(program: str, error: BaseException, has_started: bool) -> str | None:
    """Return the sentence for the user; None for an error that keeps its traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    running = [frame.f_code.co_name for frame in frames]
    variables = (one for frame in reversed(frames) for one in frame.f_locals.values())
    args = next((one for one in variables if isinstance(one, Namespace) and hasattr(one, "save")), Namespace())
    is_saving = "save_checkpoint" in running
    if is_saving and args.save is None:  # Megatron saves before it stops only because of a loss
        return DIVERGED
    if not is_saving and running[-1] == "validate_result" and args.rerun_mode == "disabled":
        return DIVERGED
    if has_started and (isinstance(error, OSError) or not is_saving):
        return None
    if isinstance(error, ValueError) and Path(frames[-1].f_code.co_filename).is_relative_to(PACKAGE):
        return str(error)
    if (known := _known(reason(error), args)) is not None:
        return known
    place = next((PHASES[name] for name in reversed(running) if name in PHASES), "the run cannot start")
    said = sentence_of_the_machine(error) or f"{place.format(save=getattr(args, 'save', None))}: {reason(error)}"
    said = said.rstrip(".") + _named_flags(all_parser(program), error, args)
    if is_saving:  # on a full disk Megatron and torch report a file of an unexpected size
        there = next(path for path in (Path(args.save), *Path(args.save).absolute().parents) if path.exists())
        said += f"; {shutil.disk_usage(there).free / 2**20:.1f} MiB are free there"
    said += next((f"; {advice}" for part, advice in ADVICE.items() if part in str(error)), "")
    return f"{said}; the traceback is in {keep_traceback(error)}."


def _known(message: str, args: Namespace) -> str | None:
    """Return the sentence for a common refusal of Megatron, with the flags that were typed; None for another one."""
    values = defaultdict[str, Any](lambda: "?", vars(args))
    if getattr(args, "data_parallel_size", None) and args.micro_batch_size:
        values["sequences_at_once"] = args.micro_batch_size * args.data_parallel_size
    for part, sentence in SENTENCES:
        if part.format_map(values) in message:
            return sentence.format_map(values)
    return None


def reason(error: BaseException) -> str:
    """Return the message in one line; if it is empty, the failed assertion's condition or the exception type."""
    error = root_of(error)
    message = " ".join(str(error).split())[:250].rstrip(".")
    if isinstance(error, AssertionError):
        condition = re.sub(r"^assert\s+", "", _statements(error)[-1]) if error.__traceback__ else "a condition"
        return message or f"{condition} does not hold"
    return f"{type(error).__name__} {message}".strip() if len(message.split()) < 3 else message


def _statements(error: BaseException) -> list[str]:
    """Return the source lines that were running, outermost first."""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        first, last = frame.lineno or 1, frame.end_lineno or frame.lineno or 1
        lines.append(" ".join(linecache.getline(frame.filename, line).strip() for line in range(first, last + 1)))
    return lines


def _named_flags(parser: ArgumentParser, error: BaseException, args: Namespace) -> str:
    """Return flags that the message names or quotes, or else the innermost statement that reads some, with values.

    A statement reads flags that have nothing to do with the mistake too: those at their defaults are left out, unless
    the message reports a missing one.
    """
    flags = {action.dest: action.option_strings[0] for action in parser._actions}
    switches = {action.dest: action.default for action in parser._actions if action.nargs == 0}
    given = {
        action.dest: value
        for action in parser._actions
        if (value := getattr(args, action.dest, None)) is not None and value != action.default
    }
    message = str(root_of(error))
    names = _names(message, r"--([a-z0-9-]{2,})|\b([a-z0-9]+(?:[_-][a-z0-9]+)+)\b", flags)
    names = names or _quoted(message, given)
    attributes = r"\b(?:args|config|self)\.(\w+)"
    for statement in reversed(_statements(error)[-FARTHEST:]):
        if names:
            break
        read = _names(statement, attributes + (r"|\b(\w+)\b" if statement.startswith("assert") else ""), flags)
        is_missing = "NoneType" in message
        names = [name for name in read if name in given or (is_missing and getattr(args, name, 0) is None)]
    values = [
        f"{flags[name]} is {'given' if name in switches else getattr(args, name)}"
        for name in names
        if hasattr(args, name) and getattr(args, name) is not switches.get(name, args)
    ]
    return f" ({', '.join(values)})" if 0 < len(values) <= MOST_NAMED else ""


def _quoted(message: str, given: dict[str, Any]) -> list[str]:
    """Return arguments whose values appear in the message and are unusual: below 0, NaN, or with a decimal point."""
    quoted = re.findall(r"(?<![\w.])-?\d+\.\d+|(?<![\w.-])-\d+|\bnan\b", message)
    numbers = {name: value for name, value in given.items() if type(value) in (int, float)}
    return [
        name
        for name, value in numbers.items()
        if any(str(value) == word or (value < 0 and value == float(word)) for word in quoted)
    ]


def _names(text: str, pattern: str, flags: dict[str, str]) -> list[str]:
    """Return arguments that the text names."""
    found = [match[match.lastindex or 0] for match in re.finditer(pattern, text)]
    renamed = [NAMES_ELSEWHERE.get(name := word.replace("-", "_"), name) for word in found]
    return [name for name in dict.fromkeys(renamed) if name in flags]
