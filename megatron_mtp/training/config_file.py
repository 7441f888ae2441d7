"""Flags from a YAML file.

`--config run.yaml` reads the flags of a run from a file:

    model:                       # section names are free and have no effect
      num-layers: 4              # --num-layers 4; num_layers is equivalent
      swiglu: true               # --swiglu; false leaves it out
    data:
      data-path: [0.7, a, 0.3, b]    # --data-path 0.7 a 0.3 b
    lr: 1e-3

`--no-swiglu` on the command line unsets a switch from the file. Values are read as text, so 90,10,0 and 1e-3 are not
converted.
"""

from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator
from pathlib import Path

import yaml

from megatron_mtp.common.errors import flags_meant

NOT_IN_A_FILE = {"config", "dry-run", "help", "help-megatron", "list-losses", "recipe", "verbose"}
"""Flags that take effect before the file is read."""


SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def flags_of(file: Path, parser: ArgumentParser) -> list[str]:
    """Convert the flags of a file to command-line words; `parser` has all flags.

    Raises:
        ValueError: the file cannot be read, has an unknown flag, a flag twice, or a value that the flag does not
            accept.
    """
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        entries = [] if root is None else list(_entries(root))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"--config is {file}, which cannot be read as YAML ({said}); correct it.") from error
    except RecursionError:  # a section may be an alias of an enclosing one
        raise ValueError(f"--config is {file}, whose sections are nested too deeply; write fewer levels.") from None
    words, seen = [], dict[str, int]()
    for key, value in entries:
        name, line = key.value.replace("_", "-"), key.start_mark.line + 1
        flag, where = f"--{name}", f"--config {file}, line {line}"
        action = parser._option_string_actions.get(flag)
        if name in NOT_IN_A_FILE:
            raise ValueError(f"{where}: '{key.value}' cannot be in a file; give {flag} on the command line.")
        if action is None:
            hint = flags_meant([flag], parser) or "; --help-megatron lists all flags."
            raise ValueError(f"{where}: there is no flag {flag}{hint}")
        if name in seen:
            raise ValueError(f"{where}: '{key.value}' is in line {seen[name]} already; remove one of the two.")
        seen[name] = line
        if isinstance(value, yaml.SequenceNode):
            given = [item.value for item in value.value if isinstance(item, yaml.ScalarNode)]
            if action.nargs not in ("*", "+") or len(given) != len(value.value):
                raise ValueError(f"{where}: {flag} does not take a list; give one value.")
            words += [flag, *given]
        elif action.nargs == 0 and not value.tag.endswith(":null"):
            if (is_on := SWITCH.get(value.value.lower())) is None:
                raise ValueError(f"{where}: {flag} is a switch, and was given '{value.value}'; give true or false.")
            off = [f"--no-{name}"] if isinstance(action, BooleanOptionalAction) else []
            words += [flag] if is_on else off
        elif not value.tag.endswith(":null"):
            words += [flag, value.value]
    return words


def named_flags(words: list[str], parser: ArgumentParser) -> set[str]:
    """Return the names of the arguments that these words set, with hyphens.

    Abbreviated flags are resolved as by argparse.
    """
    known = parser._option_string_actions
    names = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    actions = [action for flag, action in known.items() if flag in names]
    for short in names - known.keys():
        actions += [action for flag, action in known.items() if flag.startswith(short)]
    return {action.dest.replace("_", "-") for action in actions}


def without_unset(words: list[str], typed: list[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Join the words of a file and of the command line, without switches that `--no-X` unsets."""
    known = parser._option_string_actions
    switches = {word for word in words if word in known and known[word].nargs == 0}
    unset = {f"--no-{word[2:]}": word for word in switches if f"--no-{word[2:]}" not in known}
    gone = {unset[word] for word in typed if word in unset}
    return [word for word in words if word not in gone], [word for word in typed if unset.get(word) not in gone]


def _entries(node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield keys and values, including those of sections."""
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("it holds no keys with values; write lines such as 'num-layers: 4'")
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode):
            yield from _entries(value)
        elif isinstance(key, yaml.ScalarNode):
            yield key, value
        else:
            raise ValueError(f"line {key.start_mark.line + 1}: a key is not a name of a flag")
