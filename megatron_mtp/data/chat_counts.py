"""What counts in a data set of chats, and how that is reported."""

from collections.abc import Sequence

COUNTS = 1
"""Mode of a sequence whose tokens count."""

LEFT_OUT = {
    "bad_lines": "{} of {chats} lines are skipped because they cannot be trained on (--chat-skip-bad-lines)",
    "chats_without_answer": "{} of {chats} chats are skipped because they have no assistant message",
    "chats_without_trained_answer": "{} of {chats} chats are skipped because all their assistant messages are masked",
    "masked_turns": "{} assistant messages are masked by their own fields (weight, loss, train or the like)",
    "history_turns": "{} assistant messages are masked because others follow (--chat-mask-history)",
    "opening_turns": "{} assistant messages are masked because they begin a chat",
    "unthought_turns": "{} assistant messages are trained on without their reasoning, which the chat template drops",
    "unopened_turns": "{} assistant messages are trained on without the thought that the generation prompt opens, as "
    "the chat template renders them; give data with reasoning, or a template with {{% generation %}}, to train on "
    "thoughts",
    "empty_turns": "{} assistant messages are empty, which trains the model to give empty answers",
}
"""What is not trained on, or not as it was written, and the line that reports it."""


def lines_of(left_out: dict[str, int], chats: int, bad: Sequence[str]) -> list[str]:
    """Return lines that report what is not trained on.

    Args:
        left_out: counts, by the names in `LEFT_OUT`.
        chats: number of lines of all files.
        bad: the first bad lines, with place and reason.
    """
    said = [
        text.format(f"{left_out[name]:,}", chats=f"{chats:,}") for name, text in LEFT_OUT.items() if left_out.get(name)
    ]
    return [*said, *(f"left out: {reason}" for reason in bad)]
