"""Drafts token by token: accepted, rejected, and the trunk's own tokens."""

from html import escape
from typing import Any

from megatron_mtp.report.panels import scrolled

Step = dict[str, Any]

KEY = (
    '<p class="key"><span class="prompt">prompt</span> <span class="accepted">drafted and accepted</span> '
    '<span class="own">the trunk\'s own</span> <del>drafted and rejected</del></p>'
)


def section(name: str, drafts: dict[str, Any]) -> str:
    """A run's figures of drafting and its texts."""
    method = "plain decoding" if drafts["config"] is None else str(drafts["config"]["method"])
    texts = (_text(number, text, drafts["pieces"]) for number, text in enumerate(drafts["texts"], start=1))
    return (
        f"<h3>{escape(name)}: {escape(method)}</h3>{_figures(drafts['figures'])}{by_position(drafts['texts'])}"
        f"{KEY}{''.join(texts)}"
    )


def _figures(figures: dict[str, Any]) -> str:
    """Scalars as they were written; lists are in the table by position."""
    rows = (
        f'<tr><th scope="row">{escape(name.replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for name, value in figures.items()
        if value is not None and not isinstance(value, list)
    )
    return f"<table><caption>Cost</caption>{''.join(rows)}</table>"


def by_position(texts: list[dict[str, Any]]) -> str:
    """How often a draft had a position k, on its longest path, and how often the target accepted drafts 1 .. k.

    The conditional acceptance is among the drafts whose tokens 1 .. k-1 were accepted.
    """
    steps = [step for text in texts for step in text["steps"]]
    deepest = max((reach(step) for step in steps), default=0)
    rows = []
    for place in range(1, deepest + 1):
        offered = sum(reach(step) >= place for step in steps)
        reached = sum(reach(step) >= place and step["accepted"] >= place - 1 for step in steps)
        accepted = sum(step["accepted"] >= place for step in steps)
        conditional = accepted / reached if reached else 0.0
        rows.append(
            f'<tr><th scope="row">{place}</th><td>{offered}</td><td>{accepted}</td>'
            f"<td>{accepted / offered:.1%}</td><td>{conditional:.1%}</td></tr>"
        )
    names = ("position", "drafted", "accepted", "acceptance", "conditional acceptance")
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    table = f"<table><caption>Drafts by position</caption><tr>{heads}</tr>{''.join(rows)}</table>"
    return scrolled("drafts by position", table) if rows else ""


def reach(step: Step) -> int:
    """The longest path of candidates: of drafted [a, b, c] with parents [0, 0, 2] it is 2, the path b, c."""
    level = [0]
    for token, parent in zip(step["drafted"], step["parents"], strict=True):
        level.append(level[parent] + 1 if token is not None and level[parent] >= 0 else -1)
    return max(level)


def rejected(step: Step) -> list[int]:
    """The candidates that are not on the accepted path, in their order."""
    row, path = 0, set()
    nodes = list(zip(step["drafted"], step["parents"], strict=True))
    for token in step["emitted"][: step["accepted"]]:
        row = next((n for n, node in enumerate(nodes, start=1) if node == (token, row)), row)
        path.add(row)
    return [token for n, (token, _) in enumerate(nodes, start=1) if token is not None and n not in path]


def _text(number: int, text: dict[str, Any], pieces: dict[str, str]) -> str:
    prompt = "".join(_piece(token, pieces) for token in text["prompt"])
    steps = "".join(_step(place, step, pieces) for place, step in enumerate(text["steps"]))
    return (
        f"<figure><figcaption>text {number}: {len(text['steps'])} forwards of the trunk</figcaption>"
        f'<div class="tokens" tabindex="0" role="group" aria-label="tokens of text {number}">'
        f'<span class="prompt">{prompt}</span>{steps}</div></figure>'
    )


def _step(place: int, step: Step, pieces: dict[str, str]) -> str:
    """The tokens of a forward: accepted, then rejected, then the trunk's own."""
    accepted = step["emitted"][: step["accepted"]]
    parts = [
        _token("span", "accepted", token, f"step {place}: draft {number}, accepted", pieces)
        for number, token in enumerate(accepted, start=1)
    ]
    parts += [_token("del", "", token, f"step {place}: draft, rejected", pieces) for token in rejected(step)]
    own = step["emitted"][step["accepted"] :]
    parts += [_token("span", "own", token, f"step {place}: the trunk's own", pieces) for token in own]
    return "".join(parts)


def _token(tag: str, kind: str, token: int, hint: str, pieces: dict[str, str]) -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<{tag}{kind} title="{escape(hint)} (id {token})">{_piece(token, pieces)}</{tag}>'


def _piece(token: int, pieces: dict[str, str]) -> str:
    """The token's text, or its id if there is no text; a line break is shown as a sign and made."""
    piece = pieces.get(str(token))
    return f"{token} " if piece is None else escape(piece).replace("\n", "⏎\n")
