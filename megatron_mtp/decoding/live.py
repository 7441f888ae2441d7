"""The texts of an engine while they live: one that is being prefilled, and groups of those that are decoded.

Prompts run together, in parts. A text whose prompt has run joins the group of texts that draft alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_mtp.decoding.auto import AutoK
from megatron_mtp.decoding.blocks import Held
from megatron_mtp.decoding.judged import NO_PENALTIES, Judge, logprobs_of, penalised
from megatron_mtp.decoding.kv_cache import chain_rows, rounded
from megatron_mtp.decoding.loop import Group, Limits, catch_up, emitted_of
from megatron_mtp.decoding.method import Method
from megatron_mtp.decoding.recurrent_state import ROLLED_BACK
from megatron_mtp.decoding.requests import Finish, Request, TokenLogprob, Update
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import RECOVER, draw, sampling_of
from megatron_mtp.decoding.sequences import Progress, Sequences
from megatron_mtp.decoding.stats import AcceptanceStats
from megatron_mtp.decoding.types import Draft, Emitted, End
from megatron_mtp.decoding.verifiers import VERIFIERS

FAR_BEHIND = 32
"""Rows that a text's drafter may be behind to catch up with the others' rows; with more it runs them alone. The others
run as many rows anew, so where these change states they are half of what a state goes back."""

FINISH = {None: None, End.STOP: Finish.STOP, End.BUDGET: Finish.LENGTH}


@dataclass
class Text:
    """A request while the engine has it.

    Attributes:
        number: what `add` returned; a smaller one came earlier.
        tokens: the prompt and what was emitted.
        held: its blocks.
        entry: where recurrent layers keep its states; None where it has no place.
        run: rows of the trunk that the prefill has done.
        alone: whether it shares no forward with others, after one that has failed.
        cached: tokens of the prompt whose rows were found; None before the text first had a place.
        prompt_logprobs: as far as the prompt has run.
    """

    number: int
    request: Request
    method: Method
    limits: Limits
    tokens: list[int]
    held: Held = field(default_factory=Held)
    entry: int | None = None
    progress: Progress = field(default_factory=Progress)
    run: int = 0
    alone: bool = False
    cached: int | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Whether it has emitted a token."""
        return len(self.tokens) > len(self.request.prompt)

    @property
    def rows(self) -> int:
        """Rows to prefill; a text that was put back goes on with its newest token, whose row has not run."""
        return len(self.tokens) - self.has_begun

    @property
    def has_run(self) -> bool:
        """Whether all rows of its prompt have run."""
        return self.run == self.rows

    @property
    def slots(self) -> int:
        """Slots that its next step may write, and the one before, whose tokens the host may not know."""
        return len(self.tokens) + 2 + self.method.proposer.nodes(self.method.count) + self.method.count

    @property
    def reads_logits(self) -> bool:
        """Whether more than a token is asked of the target."""
        return self.request.logprobs is not None or self.request.penalties != NO_PENALTIES

    def update(self, emitted: Emitted, logprobs: list[TokenLogprob]) -> Update:
        """What a step gave it, for the one who asked."""
        first = len(self.tokens) - len(emitted.tokens) == len(self.request.prompt)
        return Update(
            self.number,
            emitted.tokens,
            emitted.accepted,
            emitted.offered,
            FINISH[emitted.end],
            logprobs,
            self.prompt_logprobs if first else [],
            self.cached or 0 if first else 0,
        )


class Prompts:
    """Texts whose prompts are run, a part of each, in one forward.

    Their parts end together, so a shorter one begins with padding. While only a part of a prompt has run, it is a text
    of so many tokens and one more: so drafters catch up part by part, by what they do for any text.

    Args:
        sequences: a row for each text.
    """

    def __init__(self, runner: Runner, texts: list[Text], sequences: Sequences) -> None:
        self.runner, self.texts, self.sequences = runner, texts, sequences
        sequences.prompt_lengths = [len(text.request.prompt) for text in texts]
        sequences.progress = [text.progress for text in texts]
        sequences.packs = not sequences.few_shapes
        for row, text in enumerate(texts):
            write_table(sequences, row, text.held.blocks)

    def run(self, counts: list[int]) -> None:
        """Run so many rows of each text through the trunk."""
        if any(counts):
            self._forward(counts)
        for text, count in zip(self.texts, counts, strict=True):
            text.run += count
        self._show()

    def begin(self) -> list[Update]:
        """Draw the first token of each text whose prompt has run, if it has none."""
        sequences = self.sequences
        begins = [text.has_run and not text.has_begun for text in self.texts]
        if not any(begins):
            return []
        sequences.live = begins
        sequences.live_B.copy_(self._tensor(begins))
        logits_BV = self.runner.logits(sequences.states_at(sequences.length_B - 1, 1))[:, 0]
        sequences.append(self._drawn(logits_BV))
        made = [self._began(row, gained, logits_BV) for row, gained in enumerate(sequences.read_back()) if begins[row]]
        sequences.live = [True] * len(self.texts)
        sequences.live_B.fill_(True)
        return made

    def part(self, texts: list[Text]) -> Sequences:
        """Some of the texts, which draft alike, as a batch of their own."""
        rows = [row for row, text in enumerate(self.texts) if any(text is one for one in texts)]
        part = self.sequences.only(rows)
        if part.few_shapes:
            method = texts[0].method
            part.growth, part.reach = method.count + 1, method.proposer.nodes(method.count) + 1
        return part

    def _forward(self, counts: list[int]) -> None:
        sequences, most = self.sequences, max(counts)
        ends = [text.run + count for text, count in zip(self.texts, counts, strict=True)]
        first_B = self._tensor(ends) - most
        window = min(rounded(max(ends), sequences.few_shapes), sequences.capacity)
        live_BR = self._not_yet_run(first_B, counts)
        rows = chain_rows(first_B, most, window, sequences.capacity, live_BR, sequences.packs)
        hidden_SBH = self.runner.trunk(sequences.tokens_at(first_B, most), rows, sequences.cache)
        sequences.put_states(hidden_SBH, rows)
        for row, (text, count) in enumerate(zip(self.texts, counts, strict=True)):
            if text.request.prompt_logprobs is not None:
                self._read_prompt(text, hidden_SBH[most - count :, row : row + 1], text.request.prompt_logprobs)

    def _not_yet_run(self, first_B: Tensor, counts: list[int]) -> Tensor | None:
        """False for rows that have run; None where there are none beside those before slot 0."""
        most = max(counts)
        if all(text.run == 0 or count == most for text, count in zip(self.texts, counts, strict=True)):
            return None
        place_BR = first_B.unsqueeze(1) + torch.arange(most, device=first_B.device)
        return place_BR >= self._tensor([text.run for text in self.texts]).unsqueeze(1)

    def _show(self) -> None:
        """Let each text be one of its rows that have run, and one more."""
        shown = [(text.tokens, min(text.run + 1, len(text.tokens))) for text in self.texts]
        self.sequences.texts = [whole if length == len(whole) else whole[:length] for whole, length in shown]
        self.sequences.length_B.copy_(self._tensor([length for _, length in shown]))

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        """The token after each text."""
        rows = [
            penalised(text.request.penalties, text.tokens, len(text.request.prompt), own_1V)
            for text, own_1V in zip(self.texts, logits_BV.split(1), strict=True)
        ]
        probs_BV = sampling_of([text.request.sampling for text in self.texts]).probabilities(torch.cat(rows))
        return draw(probs_BV, self.sequences.noise.uniform(RECOVER, 1)[:, 0])

    def _began(self, row: int, gained: list[int], logits_BV: Tensor) -> Update:
        text = self.texts[row]
        emitted = emitted_of(self.sequences, text.limits, row, gained, 0, None)
        self.sequences.settle(row, emitted.tokens, emitted.end is not None)
        top = text.request.logprobs
        return text.update(emitted, [] if top is None else logprobs_of(logits_BV[row : row + 1], emitted.tokens, top))

    def _read_prompt(self, text: Text, hidden_S1H: Tensor, top: int) -> None:
        after = text.request.prompt[text.run + 1 :][: hidden_S1H.size(0)]
        if after and not text.has_begun:
            text.prompt_logprobs += logprobs_of(self.runner.logits(hidden_S1H)[0, : len(after)], after, top)

    def _tensor(self, values: list[int] | list[bool]) -> Tensor:
        return torch.tensor(values, device=self.runner.device)


class Late:
    """What a step gave its texts, on its way to the host while the next step runs.

    Args:
        texts: in the rows of the step.
        then_B: their lengths before it.
    """

    def __init__(self, texts: list[Text], sequences: Sequences, then_B: Tensor, draft: Draft) -> None:
        self.texts, self.nodes = [*texts], draft.nodes
        gained_B1 = (sequences.length_B - then_B).unsqueeze(1)
        parts = [gained_B1, sequences.tokens_at(then_B, draft.nodes + 1), draft.valid()]
        self._read = on_its_way(torch.cat(parts, dim=1))

    def gained(self) -> Iterator[tuple[Text, list[int], int]]:
        """Every text with its new tokens and the depth of its draft; waits for them."""
        for text, (count, *values) in zip(self.texts, self._read(), strict=True):
            valid = values[self.nodes + 1 :]
            yield text, values[:count], next((n for n, ok in enumerate(valid) if not ok), self.nodes)


def on_its_way(values_BX: Tensor) -> Callable[[], list[list[int]]]:
    """Start to copy numbers to the host; what is returned waits for them, and for nothing that is begun later."""
    if not values_BX.is_cuda:
        return values_BX.tolist
    held_BX = torch.empty(values_BX.shape, dtype=values_BX.dtype, pin_memory=True)
    held_BX.copy_(values_BX, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[list[int]]:
        copied.synchronize()
        return held_BX.tolist()

    return wait


@dataclass
class Shown:
    """What steps have shown, for automatic K, of groups of one size."""

    auto: AutoK | None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)


class LiveGroup(Group):
    """Texts that draft alike. They join and leave between steps.

    With overlap a step is started before the tokens of the last one are read. So the host learns one step late that a
    text has ended; what the step in between gave it is dropped. Lengths that the host does not know are bounded by
    `Sequences.ahead`.

    Args:
        overlap: whether to do so where a step reads nothing back.
        shown: what was measured with so many texts.
        hand: called with a text and its update.
    """

    def __init__(
        self,
        runner: Runner,
        texts: list[Text],
        sequences: Sequences,
        shown: Callable[[int], Shown],
        hand: Callable[[Text, Update], None],
        overlap: bool = False,
    ) -> None:
        super().__init__(runner, sequences, texts[0].method, [text.limits for text in texts], self._give)
        self.texts, self._shown, self._hand, self._overlap = texts, shown, hand, overlap
        self._late: Late | None = None
        self._changed()

    def join(self, texts: list[Text], sequences: Sequences) -> None:
        """More texts, which have their first tokens."""
        self.sequences.join(sequences)
        self.texts += texts
        self._changed()

    def leave(self, gone: list[Text]) -> None:
        """Go on without these texts."""
        rows = [row for row, text in enumerate(self.texts) if not any(text is one for one in gone)]
        self.sequences.keep_texts(rows)
        self.texts = [self.texts[row] for row in rows]
        self._changed()

    def place(self, text: Text) -> None:
        """Tell the device of a text's new blocks."""
        row = next(row for row, one in enumerate(self.texts) if one is text)
        write_table(self.sequences, row, text.held.blocks)

    def choose(self) -> int:
        """K by what groups of about this size have shown."""
        shown = self._shown(len(self.texts))
        self.method = replace(self.method, auto=shown.auto, stats=shown.stats)
        return super().choose()

    def step(self) -> None:
        """Take a step and hand out what it gave; with overlap, what the one before gave."""
        if self._late is not None and not self._overlaps:
            self._hand_out_late()
        else:
            super().step()

    def hand_out(self, draft: Draft | None) -> None:
        """Hand out this step, or the last one while this one's tokens are on their way."""
        if not self._overlaps or draft is None:
            return super().hand_out(draft)
        taken = Late(self.texts, self.sequences, self._then_B, draft)
        self._hand_out_late()
        self._late = taken

    def _hand_out_late(self) -> None:
        late, self._late = self._late, None
        rows = {id(text): row for row, text in enumerate(self.texts)}
        for text, gained, depth in () if late is None else late.gained():
            if id(text) in rows:  # else it was cancelled or put back
                self.give(rows[id(text)], gained, depth, None)

    @property
    def _overlaps(self) -> bool:
        """Whether steps of these texts read nothing back, and need no tokens that the host does not know.

        A drafter that does not know how far texts have come runs more rows anew than its states go back.
        """
        proposer, rule = self.method.proposer, VERIFIERS[str(self.method.config.verifier)]
        reads = isinstance(self.method.verifier, Judge) or proposer.drafts_trees or proposer.has_states
        return self._overlap and not reads and proposer.recordable and rule.recordable

    def prepare(self, count: int) -> None:
        """Texts that are far behind catch up alone, so that the others need not run as many rows."""
        proposer, sequences = self.method.proposer, self.sequences
        sequences.ahead = 0 if self._late is None else self.method.count + 1
        if self._overlaps:
            self._then_B = sequences.length_B.clone()
        far = 0 if proposer.leaves_rows_out else ROLLED_BACK // 2 if proposer.has_states else FAR_BEHIND
        if count == 0 or proposer.missed(sequences, count) <= far:
            return
        for row in range(len(self.texts)):
            alone = sequences.alone(row)
            if proposer.missed(alone, count) > far:
                catch_up(alone, self.method, count)

    def _changed(self) -> None:
        """What a step knows of its texts."""
        self.limits = [text.limits for text in self.texts]
        rule: Callable[..., object] = self.texts[0].method.verifier if self.texts else self.method.verifier
        if any(text.reads_logits for text in self.texts):
            penalties, prompts = [one.request.penalties for one in self.texts], self.sequences.prompt_lengths
            rule = Judge(rule, penalties, prompts)  # type: ignore[arg-type]
        if self.texts:
            sampling = sampling_of([text.request.sampling for text in self.texts])
            self.method = replace(self.method, sampling=sampling, verifier=rule)  # type: ignore[arg-type]

    def _give(self, emitted: Emitted) -> None:
        text, rule = self.texts[emitted.text], self.method.verifier
        top = text.request.logprobs
        logprobs = (
            rule.logprobs(emitted.text, emitted.tokens, top) if isinstance(rule, Judge) and top is not None else []
        )
        self._hand(text, text.update(emitted, logprobs))


def write_table(sequences: Sequences, row: int, blocks: list[int]) -> None:
    """The blocks of a text's pages."""
    pages = sequences.pages
    assert pages is not None
    pages.table_BL[row, : len(blocks)] = torch.tensor(blocks, device=pages.table_BL.device)
