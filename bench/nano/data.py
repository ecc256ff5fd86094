"""Conversations: turns put together, rendered by glm53d's own template and encoder, with a mask of what to learn.

    python -m bench.nano.data [NUMBER]        prints some

Sample i of a split is a function of the seed and i, whoever asks for it and when: a run that was interrupted goes on
with the data it would have had.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from bench.nano import toolbox, values
from bench.nano.chats import BESIDE_TOOLS, Json, Turn, chat, hidden, recall
from glm53d.chat.conversation import Conversation
from glm53d.chat.template import Segment, Template
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab

SEED = 53
EFFORTS = ("low", "high", "max")
MARKS = tuple(mark.encode() for mark in ".:。：")  # behind what is wanted
NAME_IDS = 3
NONE = -1
NO_TOOL = 0  # an id that begins no name
CHOOSING = 3  # tokens behind what is wanted
COPY_DRILLS = 0.35  # of all drills
MAX_LEN = 4096
Span = tuple[int, int]  # of tokens, the second behind the last


@dataclass(slots=True)
class Sample:
    """A conversation that ends with an answer of the model."""

    turns: list[Turn]
    conversation: Conversation
    ends_in_call: bool


@dataclass(slots=True)
class Encoded:
    """ids and, of each, whether it is the model's own: to be predicted. kinds: of each trained turn, with its span.
    tools [tokens, NAME_IDS]: the first ids of the name of the tool that a token describes; NONE elsewhere.
    called [tokens, NAME_IDS]: the same of the tool that a turn calls, from where its name has been written.
    chosen [tokens, NAME_IDS]: from where it has been thought what is wanted to the tool's name, the same of the tool to
    call; NO_TOOL where there is none.
    copied [tokens]: before a token that is copied, where from; behind a copied text, what stands behind its source;
    behind a thing that is listed, how many are wanted; NONE elsewhere.
    described [tokens]: where tokens are chosen, the place where a tool's description says what is wanted, or 0 if none
    does; at the end of what a quote or a space opens, where that is; NONE elsewhere.
    """

    ids: np.ndarray
    own: np.ndarray
    kinds: list[tuple[str, int, int]]
    tools: np.ndarray
    called: np.ndarray
    chosen: np.ndarray
    copied: np.ndarray
    described: np.ndarray


def sample(index: int, *, split: str = "train") -> Sample:
    """Conversation number `index` of a split, of which every name is one."""
    rng = Random(f"{SEED} {split} {index}")
    zh = rng.random() < 0.25
    tools: list[toolbox.Tool] = []
    turns: list[Turn] = []
    rest = rng.random()
    if rng.random() < 0.5:
        tools = toolbox.toolbox(rng)
        for left in range(rng.choices((0, 1, 2, 3, 5), (0.25, 0.2, 0.2, 0.2, 0.15))[0], -1, -1):
            turns += _tool_round(rng, tools, zh, is_last=not left)
    elif rest < 0.25:
        between = [chat(rng, zh) for _ in range(rng.choices((0, 1, 2, 6), (0.4, 0.3, 0.25, 0.05))[0])]
        turns = recall(rng, zh, between)
    elif rest < 0.35:
        turns = hidden(rng, zh, rng.randint(40, 180) if rng.random() < 0.2 else rng.randint(2, 20))
    elif rest < 0.4:
        turns = [toolbox.no_call(rng, [], zh)]
    else:
        turns = [chat(rng, zh) for _ in range(rng.choices((1, 2, 3, 4), (0.4, 0.3, 0.15, 0.15))[0])]
    effort = rng.choices(EFFORTS, (0.25, 0.25, 0.5))[0]
    # Clients that give thinking back, and clients that do not: without it there is only the last turn to learn.
    keep = len(turns) == 1 or rng.random() < 0.7
    messages: list[Json] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(values.PREAMBLES)})
    for turn in turns:
        messages += (turn.message, answer_of(turn, effort, with_thought=keep or turn is turns[-1]))
    schemas = [tool.schema for tool in tools] or None
    conversation = Conversation(messages, schemas, effort, add_generation_prompt=False)
    return Sample(turns, conversation, turns[-1].call is not None)


def answer_of(turn: Turn, effort: str, *, with_thought: bool) -> Json:
    """The assistant's message."""
    message: Json = {"role": "assistant", "content": turn.answer}
    if with_thought:
        message["reasoning_content"] = turn.thoughts[EFFORTS.index(effort)]
    if turn.call is not None:
        name, arguments = turn.call
        message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return message


class Codec:
    """Renders and encodes as the daemon does, with one tokenizer."""

    def __init__(self, tokenizer: Path):
        self.vocab = Vocab.load(tokenizer)
        self.encoder = Encoder(tokenizer, self.vocab, 1)
        self.template = Template(self.vocab.added)
        self._speakers = [self.vocab.added[name] for name in ("<|user|>", "<|observation|>")]
        self._role_ends = [*self._speakers, self.vocab.added["<|endoftext|>"]]
        self._assistant, self._think_end = self.vocab.added["<|assistant|>"], self.vocab.think_end
        self._before_name = np.asarray(self.encoder.encode_segments(['{"name": "']))
        self._ends_line = np.array([token.endswith(b"\n") for token in self.vocab.token_bytes])
        texts = [token.removeprefix(b" ") or token for token in self.vocab.token_bytes]
        self.texts = np.array([texts.index(text) for text in texts])  # of each token, the first that says the same
        self.spaced = np.array([token.startswith(b" ") for token in self.vocab.token_bytes])
        self._marks = np.flatnonzero([token.startswith(MARKS) for token in self.vocab.token_bytes])
        self.opens = np.array([not token.strip(b' "') for token in self.vocab.token_bytes])
        self._call_end, self._value_end = (self.vocab.added[name] for name in ("</tool_call>", "</arg_value>"))

    def segments(self, drawn: Sample) -> list[Segment]:
        """The whole conversation, the end of the last turn included."""
        end = "<|observation|>" if drawn.ends_in_call else "<|user|>"
        return [*self.template.render(drawn.conversation), self.vocab.added[end]]

    def encode(self, drawn: Sample) -> Encoded:
        """Ids, and which of them the model writes: from behind <think> to the end of the turn."""
        ids = np.asarray(self.encoder.encode_segments(self.segments(drawn)))
        own, text = np.zeros(len(ids), bool), _Text(ids, self)
        kinds = []
        starts = np.flatnonzero(ids == self._assistant) + 2  # behind <|assistant|><think>
        ends = np.flatnonzero(np.isin(ids, self._role_ends))
        for turn, start in zip(drawn.turns, starts.tolist(), strict=True):
            if ids[start] == self._think_end:
                continue  # its thinking was not given back
            stop = int(ends[np.searchsorted(ends, start)]) + 1
            own[start:stop] = True
            kinds.append((turn.kind, start, stop))
            if turn.kind in ("tool", "no tool") and not turn.copied:
                mark = start + int(np.isin(ids[start:stop], self._marks).argmax())
                self._mark_choice(text, mark, stop, turn.call[0] if turn.call else None, turn.thoughts[0])
            self._mark_copies(text, turn, start, stop)
        return Encoded(ids, own, kinds, self._tools(ids), text.called, text.chosen, text.copied, text.described)

    def _mark_choice(self, text: "_Text", mark: int, stop: int, name: str | None, wanted: str) -> None:
        """What is wanted has been thought before a mark; which tool does it is to be known until its name is said."""
        until = min(mark + CHOOSING, stop)
        if name is not None and (said := text.find(name, (mark, stop), "`%s`") or text.find(name, (mark, stop))):
            until = said[1]
        text.chosen[mark:until] = self._first_ids(name)
        text.described[mark - 1 : until] = self._described(text, name, wanted)

    def _mark_copies(self, text: "_Text", turn: Turn, start: int, stop: int) -> None:
        """Of a turn that is written from start to stop."""
        [speaks] = np.isin(text.ids[:start], self._speakers).nonzero()
        message = int(speaks[-1]), start
        if turn.call is not None:
            self._mark_call(text, *turn.call, (start, stop), message, is_named=bool(turn.copied))
            return
        answer = start + int((text.ids[start:stop] == self._think_end).argmax())
        source = text.find(turn.source, (0, start)) if turn.source else message
        for part in turn.copied:
            answer = text.copy(part, (answer, stop), source, is_opened=True)
        for part in turn.listed:
            answer = text.look(part, (answer, stop), turn.number, message)

    def _mark_call(
        self, text: "_Text", name: str, arguments: Json, written: Span, message: Span | None, *, is_named: bool = False
    ) -> None:
        """Names come from where the tool is described, or from the message if it is named there; when said again, from
        where they were said. Values, if there is a message, come from there.
        """
        start, stop = written
        call = start + int((text.ids[start:stop] == self._think_end).argmax())
        described, line = self._line(text, name)
        said = message if is_named else described
        for at, end, form in ((start, call, "`%s`"), (call, stop, "%s")):
            if found := text.find(name, (at, end), form):
                at = text.copy(name, (at, end), said, form)
                text.called[at - 1 : stop] = self._first_ids(name)
                said = found
            for parameter, value in arguments.items():
                at = text.copy(parameter, (at, end), line, form, '"%s": {')
                if message is not None and at > call:
                    at = text.copy(str(value), (at, end), message)
        end = call + int((text.ids[call:] == self._call_end).argmax())
        values_end = call + np.flatnonzero(text.ids[call:end] == self._value_end)
        text.copied[values_end] = [*text.copied[values_end[:-1] + 1], line[1]]  # is there one more parameter?

    def _line(self, text: "_Text", name: str) -> tuple[Span, Span]:
        """Where a tool's name stands at the beginning of its description, and the whole from there."""
        found = text.find(name, (0, len(text.ids)), '{"name": "%s"')
        assert found is not None
        return found, (found[0], found[0] + int(self._ends_line[text.ids[found[0] :]].argmax()))

    def _described(self, text: "_Text", name: str | None, wanted: str) -> int:
        """The last token of what is wanted in a tool's description."""
        if name is None:
            return 0
        _, line = self._line(text, name)
        found = text.find(wanted.rstrip(".。"), line, '"description": "%s')
        assert found is not None
        return found[1] - 1

    def _first_ids(self, name: str | None) -> np.ndarray:
        """Of a tool's name as its description has it."""
        if name is None:
            return np.full(NAME_IDS, NO_TOOL)
        return np.asarray(self.encoder.encode_segments([f'{name}", "'])[:NAME_IDS])

    def _tools(self, ids: np.ndarray) -> np.ndarray:
        out = _no_names(ids)
        lead = len(self._before_name)
        [users] = np.nonzero(ids == self.vocab.added["<|user|>"])
        for start in (_places(self._before_name, ids[: users[0]]) + lead).tolist():
            end = start + int(self._ends_line[ids[start:]].argmax())
            for place in range(NAME_IDS):
                out[start + place : end, place] = ids[start + place]
        return out

    def tool_drill(self, rng: Random) -> Encoded:
        """Tools, and turn after turn of a model that knows what it wants and has to find it among them."""
        added = self.vocab.added
        tools, asked = toolbox.drill(rng)
        greeting: list[Json] = [{"role": "user", "content": "Hi"}]
        head = Conversation(greeting, [made.schema for made in tools], "low", add_generation_prompt=False)
        parts: list[tuple[Segment, bool]] = [(segment, False) for segment in self.template.render(head)]
        start = len(self.encoder.encode_segments([segment for segment, _ in parts]))
        for wanted, found in asked:
            parts += [(added["<|assistant|>"], False), (added["<think>"], False), (f"{wanted}.", False)]
            parts.append((added["</think>"], True))
            if found is None:
                parts += [("I have no tool for that.", True), (added["<|user|>"], True)]
                continue
            parts += [(added["<tool_call>"], True), (found.name, True)]
            for name, _ in found.parameters:
                parts += [(added["<arg_key>"], True), (name, True), (added["</arg_key>"], True)]
                parts += [(added["<arg_value>"], True), (values.word(rng), False), (added["</arg_value>"], False)]
            parts += [(added["</tool_call>"], True), (added["<|observation|>"], True)]
        coded = [(self.encoder.encode_segments([segment]), is_own) for segment, is_own in parts]
        ids = np.concatenate([np.asarray(part) for part, _ in coded])
        own = np.concatenate([np.full(len(part), is_own) for part, is_own in coded])
        text = _Text(ids, self)
        for at, (wanted, found) in zip(np.flatnonzero(ids == self._think_end).tolist(), asked, strict=True):
            self._mark_choice(text, at - 1, len(ids), found.name if found else None, wanted)
            if found:
                stop = at + int((ids[at:] == self._call_end).argmax())
                self._mark_call(text, found.name, {name: None for name, _ in found.parameters}, (at, stop), None)
        kinds = [("drill", start, len(ids))]
        return Encoded(ids, own, kinds, self._tools(ids), text.called, text.chosen, text.copied, text.described)

    def drill(self, rng: Random) -> Encoded:
        """Of copying or of finding tools."""
        return self.copy_drill(rng) if rng.random() < COPY_DRILLS else self.tool_drill(rng)

    def copy_drill(self, rng: Random) -> Encoded:
        """Random ids, some times over: from the second time on each is known. No language helps, only copying does."""
        number, first = rng.randint(3, 30), min(self.vocab.added.values())
        ids = [rng.randrange(first) for _ in range(number)] * max(2, min(6, 120 // number))
        places = np.arange(len(ids))
        own, copied = places >= number, np.where(places + 1 >= number, places + 1 - number, NONE)
        no_names, nowhere = _no_names(own), np.full(len(ids), NONE)
        return Encoded(np.array(ids), own, [("drill", number, len(ids))], no_names, no_names, no_names, copied, nowhere)


class _Text:
    """Ids as text, in which words are found however they were cut."""

    def __init__(self, ids: np.ndarray, codec: Codec):
        parts = [codec.vocab.token_bytes[token] for token in ids.tolist()]
        self.ids, self.copied, self.described = ids, np.full(len(ids), NONE), np.full(len(ids), NONE)
        self.called, self.chosen = _no_names(ids), _no_names(ids)
        self._same, self._opens, self._bytes = codec.texts[ids], codec.opens[ids], b"".join(parts)
        self._starts = np.cumsum([0, *map(len, parts)])

    def find(self, text: str, span: Span, form: str = "%s") -> Span | None:
        """The tokens of the first place in a span where a text stands in this form and is no part of a longer word."""
        before, behind = (part.encode() for part in form.split("%s"))
        wanted = text.encode()
        at, stop = (int(self._starts[token]) for token in span)
        while (at := self._bytes.find(before + wanted + behind, at, stop)) >= 0:
            first, last = at + len(before), at + len(before) + len(wanted)
            if not (self._bytes[first - 1 : first].isalnum() or self._bytes[last : last + 1].isalnum()):
                begin, end = np.searchsorted(self._starts, (first, last - 1), "right").tolist()
                return begin - 1, end
            at += 1
        return None

    def copy(
        self,
        text: str,
        where: Span,
        source: Span | None,
        form: str = "%s",
        source_form: str = "%s",
        *,
        is_opened: bool = False,
    ) -> int:
        """Mark a text's tokens as copied, as far as they are cut alike, if all are, its end, too. Returns its end.

        is_opened: what opens it, if anything does, follows from what is copied, and what closes it from what opened it.
        """
        found = self.find(text, where, form)
        said = self.find(text, source, source_form) if source else None
        if found is None:
            return where[0]
        if said is not None and is_opened and self._opens[found[0] - 1]:
            self.copied[found[0] - 2] = said[0]
            self.described[found[1] - 1] = found[0] - 1
        for token, place in zip(range(*found), range(*said) if said else (), strict=False):
            if self._same[token] != self._same[place]:
                return found[1]
            self.copied[token - 1] = place
        if said is not None and found[1] - found[0] == said[1] - said[0]:
            self.copied[found[1] - 1] = said[1]
        return found[1]

    def look(self, text: str, where: Span, at: str, source: Span) -> int:
        """Mark a text's last token as one that is to look at another text; returns the end of the first."""
        found, said = self.find(text, where), self.find(at, source)
        assert found is not None and said is not None
        self.copied[found[1] - 1] = said[1] - 1
        return found[1]


def _places(part: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Where a part of ids begins in them."""
    return np.flatnonzero((np.lib.stride_tricks.sliding_window_view(ids, len(part)) == part).all(1))


def _no_names(ids: np.ndarray) -> np.ndarray:
    return np.full((len(ids), NAME_IDS), NONE)


def _tool_round(rng: Random, tools: list[toolbox.Tool], zh: bool, *, is_last: bool) -> list[Turn]:
    """One request. A call has a result, except perhaps at the end: behind a call nobody but a tool speaks."""
    roll = rng.random()
    if roll < 0.12:
        return [chat(rng, zh, BESIDE_TOOLS)]
    if roll < 0.32:
        return [toolbox.no_call(rng, tools, zh)]
    turns = [toolbox.call(rng, rng.choice(tools), zh)]
    if not is_last or rng.random() < 0.5:
        turns.append(toolbox.result(rng, zh))
    return turns


def main(number: int) -> None:
    control = Vocab.load(Path("glm53d/nano/tokenizer.json")).added
    template = Template(control)
    for index in range(number):
        print(template.render_text(sample(index).conversation), end="\n\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
