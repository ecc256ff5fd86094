"""Turns without tools: what is asked, what is thought at each effort, what is answered.

Thought and answer follow from the prompt alone, so a greedy answer can be compared with the whole of what is wanted.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from bench.nano import values
from bench.nano.faq import ABOUT, LISTS, SMALL_TALK, UNKNOWN, ZH_LISTS, ZH_UNKNOWN

Json = dict[str, object]
ENTRIES = SMALL_TALK + ABOUT
NUMBERS = "zero one two three four five six seven eight nine ten".split()
ZH_NUMBERS = "零一二三四五六七八九十"


class Fact(NamedTuple):
    """Something to remember."""

    what: str
    statement: str
    question: str
    answer: str
    reply: str  # to the statement
    value: str


@dataclass(slots=True)
class Turn:
    """A message to the model and what it should make of it."""

    kind: str
    message: Json  # the user's, or a tool's
    thoughts: tuple[str, str, str]  # at low, high and max effort, each longer than the one before
    answer: str
    call: tuple[str, Json] | None = None  # name and arguments; the answer is then empty
    zh: bool = False
    copied: tuple[str, ...] = ()  # parts of the answer, in its order, or a tool's name, that stand in the message,
    source: str = ""  # or in this text, which stands before it
    listed: tuple[str, ...] = ()  # things that the answer names, as many as
    number: str = ""  # this word of the message says


def said(
    kind: str,
    text: str,
    thoughts: tuple[str, str, str],
    answer: str,
    copied: tuple[str, ...] = (),
    source: str = "",
    *,
    zh: bool = False,
    listed: tuple[str, ...] = (),
    number: str = "",
) -> Turn:
    """A turn on something the user says."""
    if zh and kind != "fixed":
        text, answer, source = map(values.typeset, (text, answer, source))
    message: Json = {"role": "user", "content": text}
    return Turn(
        kind, message, thoughts, answer, zh=zh, copied=copied, source=source, listed=listed, number=number
    )  # fmt: skip


def thoughts(short: str, what: str, plan: str, *, zh: bool = False) -> tuple[str, str, str]:
    """At low, high and max effort. short is a word or two, what and plan are sentences."""
    if zh:
        return short, what, f"{what}{plan}想好了，现在回答。"
    return short, what, f"{what} {plan} That is all, so I answer now."


def fixed(rng: Random, zh: bool) -> Turn:
    """A question with a fixed answer."""
    entry = rng.choice(ENTRIES if rng.random() < 0.8 else SMALL_TALK)
    return known(entry_text(rng, rng.choice(entry.zh_questions if zh else entry.questions)), ENTRIES.index(entry), zh)


def known(question: str, index: int, zh: bool) -> Turn:
    """One of ENTRIES, asked in these words."""
    entry = ENTRIES[index]
    if zh:
        mind = thoughts(f"{entry.zh_topic}。", f"用户说到{entry.zh_topic}。", "这个我知道。", zh=True)
        return said("fixed", question, mind, entry.zh_answer, zh=True)
    mind = thoughts(f"{entry.topic.capitalize()}.", f"This is about {entry.topic}.", "I know what to say.")
    return said("fixed", question, mind, entry.answer)


def entry_text(rng: Random, question: str) -> str:
    """The question as people type it: with or without capital and mark."""
    roll = rng.random()
    if roll < 0.15:
        return question[0].lower() + question[1:]
    if roll < 0.3:
        return question.rstrip("?!？！.。") or question
    if roll < 0.35 and question.isascii() and question[-1] not in "?!.":
        return question + rng.choice("?!.")
    return question


def echo(rng: Random, zh: bool) -> Turn:
    """Say exactly this."""
    text = values.phrase(rng, zh, 7)
    asks = ("重复：{}", "请复述：{}", "说：{}", "跟我说：{}") if zh else (
        "Repeat exactly: {}", "Repeat: {}", "Say: {}", "Echo {}", "Repeat after me: {}", "Please say {}")  # fmt: skip
    mind = thoughts("复述。", "用户让我复述。", "我照原样写出来。", zh=True) if zh else thoughts(
        "Repeat.", "I am asked to repeat a text.", "I copy it as it is.")  # fmt: skip
    return said("echo", rng.choice(asks).format(text), mind, text, (text,), zh=zh)


def count(rng: Random, zh: bool) -> Turn:
    """Count up."""
    last = rng.randint(2, 20)
    first = 1 if rng.random() < 0.75 else rng.randint(1, last - 1)
    listed = tuple(map(str, range(first, last + 1)))
    answer = ("、" if zh else ", ").join(listed)
    if zh:
        asks: tuple[str, ...] = (f"从{first}数到{last}", f"请从 {first} 数到 {last}")
        return said(
            "count",
            rng.choice(asks),
            thoughts("数数。", f"从{first}数到{last}。", "一个一个地数。", zh=True),
            answer,
            zh=True,
            listed=listed,
            number=str(last),
        )
    spelled = NUMBERS[last] if last <= 10 and rng.random() < 0.4 else str(last)
    asks = (f"Count from {first} to {spelled}", f"Please count from {first} to {spelled}.")
    if first == 1:
        asks += (f"Count to {spelled}", f"Count to {spelled}.", f"Can you count to {spelled}?")
    mind = thoughts("Count.", f"I count from {first} to {last}.", "One number after the other.")
    return said("count", rng.choice(asks), mind, answer, listed=listed, number=spelled)


def listing(rng: Random, zh: bool) -> Turn:
    """Name a few things."""
    what, items = rng.choice(list((ZH_LISTS if zh else LISTS).items()))
    number = rng.randint(2, 5)
    named = tuple(items[:number])
    if zh:
        spelled = ZH_NUMBERS[number] if rng.random() < 1 / 3 else str(number)
        asks: tuple[str, ...] = (f"列举{spelled}种{what}", f"说出 {spelled} 个{what}", f"给我{spelled}个{what}")
        mind = thoughts(f"{what}。", f"用户要{number}个{what}。", "我列出来。", zh=True)
        return said("list", rng.choice(asks), mind, "、".join(named), zh=True, listed=named, number=spelled)
    spelled = NUMBERS[number] if rng.random() < 0.6 else str(number)
    asks = (f"List {spelled} {what}", f"Name {spelled} {what}", f"Give me {spelled} {what}", f"Tell me {spelled} {what}.",
            f"Can you list {spelled} {what}?")  # fmt: skip
    mind = thoughts(f"{what.capitalize()}.", f"The user wants {number} {what}.", "I list them.")
    answer = (" " if what == "emoji" else ", ").join(named)
    return said("list", rng.choice(asks), mind, answer, listed=named, number=spelled)


def json_object(rng: Random, zh: bool) -> Turn:
    """Given values as a JSON object."""
    who, city, age = values.name(rng, zh), values.place(rng, zh), rng.randint(1, 99)
    roll = rng.random()
    asks: tuple[str, ...]
    if roll < 0.35:
        fields: Json = {"name": who, "age": age}
        asks = (f"用 JSON 输出：name 是 {who}，age 是 {age}", f"{who}今年{age}岁。请用 JSON 给出 name 和 age。") if zh else (
            f"Give me JSON with name {who} and age {age}", f"{who} is {age} years old. Answer in JSON with name and age.",
            f"Return a JSON object with the name {who} and the age {age}.")  # fmt: skip
    elif roll < 0.6:
        fields = {"name": who, "city": city}
        asks = (f"{who}住在{city}。请用 JSON 给出 name 和 city。", f"提取 JSON，字段 name 和 city：{who}住在{city}。") if zh else (
            f"{who} lives in {city}. Answer in JSON with name and city.",
            f"Extract name and city as JSON: {who} lives in {city}.")  # fmt: skip
    else:
        keys = rng.sample((*values.NOUNS, "id", "key", "title", "size", "color", "kind"), rng.randint(1, 3))
        found = [str(rng.randint(0, 999)) if rng.random() < 0.3 else values.value(rng, zh) for _ in keys]
        fields = {key: int(item) if item.isdigit() else item for key, item in zip(keys, found, strict=True)}
        if zh:
            asks = ("用 JSON 输出：" + "，".join(f"{k} 是 {v}" for k, v in fields.items()),)
        else:
            asks = (
                "Write JSON: " + ", ".join(f"{k} is {v}" for k, v in fields.items()),
                "Give me JSON with " + " and ".join(f"{k} {v}" for k, v in fields.items()),
                "Return a JSON object: " + ", ".join(f"{k} = {v}" for k, v in fields.items()),
            )
    mind = thoughts("JSON。", "用户要一个 JSON 对象。", "我把值填进去。", zh=True) if zh else thoughts(
        "JSON.", "The user wants a JSON object.", "I fill in the values.")  # fmt: skip
    copied = tuple(str(part) for field in fields.items() for part in field)
    return said("json", rng.choice(asks), mind, json.dumps(fields, ensure_ascii=False), copied, zh=zh)


def unknown(rng: Random, zh: bool) -> Turn:
    """Something that the model cannot know, and says so."""
    return _not_known(rng, zh, ZH_UNKNOWN_ASKS if zh else UNKNOWN_ASKS)


def unknown_to_tools(rng: Random, zh: bool) -> Turn:
    """Likewise, and no tool could know it either."""
    return _not_known(rng, zh, ZH_ART_ASKS if zh else ART_ASKS)


def _not_known(rng: Random, zh: bool, asks: tuple[str, ...]) -> Turn:
    thing, who, city = values.value(rng, zh), values.name(rng, zh), values.place(rng, zh)
    text = rng.choice(asks).format(thing=thing, who=who, city=city)
    if zh:
        mind = thoughts("不知道。", "这个我没有学过。", "我如实说不知道。", zh=True)
        return said("unknown", text, mind, ZH_UNKNOWN, zh=True)
    mind = thoughts("Not known.", "I have not learned about this.", "I should say so and not make things up.")
    return said("unknown", text, mind, UNKNOWN)


ART_ASKS = (
    "Write a poem about a {thing}", "Write a story about {thing}", "Write a song about {city}", "Why is the sky blue?",
    "What do you think about {thing}?", "What is the meaning of life?", "Write a Python function that sorts a list",
)  # fmt: skip
UNKNOWN_ASKS = (
    *ART_ASKS, "What is a {thing}?", "Where is {thing}?", "Why is the {thing} important?", "How do I make a {thing}?",
    "What does {thing} mean?", "Who was {who}?", "What is the capital of France?",
    "How many people live in {city}?", "Explain {thing}", "Tell me about {thing}",
)  # fmt: skip
ZH_ART_ASKS = (
    "写一首关于{thing}的诗",
    "写一个关于{thing}的故事",
    "天空为什么是蓝色的？",
    "你觉得{thing}怎么样？",
    "人生的意义是什么？",
)
ZH_UNKNOWN_ASKS = (
    *ZH_ART_ASKS, "{thing}是什么？", "{thing}在哪里？", "为什么{thing}很重要？", "{city}有多少人？", "怎么做{thing}？",
    "中国的首都是哪里？", "{who}是谁？",
)  # fmt: skip


Make = Callable[[Random, bool], Turn]
CHATS: tuple[tuple[Make, float], ...] = (
    (fixed, 0.39), (echo, 0.16), (json_object, 0.18), (count, 0.06), (listing, 0.14), (unknown, 0.07),
)  # fmt: skip
BESIDE_TOOLS: tuple[tuple[Make, float], ...] = (
    (fixed, 0.39), (echo, 0.16), (json_object, 0.18), (count, 0.06), (listing, 0.12), (unknown_to_tools, 0.09),
)  # fmt: skip
"""Kinds of turns that need no other turn, and how often each comes."""


def chat(rng: Random, zh: bool, kinds: tuple[tuple[Make, float], ...] = CHATS) -> Turn:
    """One of the kinds."""
    return rng.choices([make for make, _ in kinds], [weight for _, weight in kinds])[0](rng, zh)


def fact(rng: Random, zh: bool) -> Fact:
    """Any."""
    who, city, secret, color = values.name(rng, zh), values.place(rng, zh), values.code(rng), rng.choice(values.COLORS)
    thing, number = values.value(rng, zh), rng.randint(100, 99999)
    if zh:
        noted = "好的，我记住了。"
        return Fact(*rng.choice((
            ("名字", f"我叫{who}。", rng.choice(("我叫什么名字？", "我是谁？")), f"你叫{who}。", f"很高兴认识你，{who}！", who),
            ("城市", f"我住在{city}。", rng.choice(("我住在哪里？", "我在哪个城市？")), f"你住在{city}。", noted, city),
            ("密码", f"密码是 {secret}。", rng.choice(("密码是什么？", "密码是多少？")), f"密码是 {secret}。", noted, secret),
            ("喜好", f"我喜欢{thing}。", "我喜欢什么？", f"你喜欢{thing}。", noted, thing),
        )))  # fmt: skip
    noted = "I will remember that."
    pet = values.name(rng, False)
    return Fact(*rng.choice((
        ("name", f"My name is {who}.", rng.choice(("What is my name?", "Who am I?", "Do you remember my name?")),
         f"Your name is {who}.", f"Nice to meet you, {who}!", who),
        ("city", f"I live in {city}.", rng.choice(("Where do I live?", "In which city do I live?")), f"You live in {city}.", noted, city),
        ("code", f"The code is {secret}.", rng.choice(("What is the code?", "Tell me the code.")), f"The code is {secret}.", noted, secret),
        ("number", f"My number is {number}.", "What is my number?", f"Your number is {number}.", noted, str(number)),
        ("color", f"My favorite color is {color}.", rng.choice(("What is my favorite color?", "Which color do I like?")),
         f"Your favorite color is {color}.", noted, color),
        ("cat", f"My cat is called {pet}.", rng.choice(("What is my cat called?", "What is the name of my cat?")),
         f"Your cat is called {pet}.", noted, pet),
        ("liking", f"I like {thing}.", "What do I like?", f"You like {thing}.", noted, thing),
    )))  # fmt: skip


def recall(rng: Random, zh: bool, between: list[Turn]) -> list[Turn]:
    """A fact, other turns, and a question about the fact."""
    told = fact(rng, zh)
    if not between and rng.random() < 0.4:
        return [_asked(told, zh, f"{told.statement} {told.question}")]
    minded = ("用户告诉我{}。", "我要记住。") if zh else ("The user tells me the {}.", "I keep it in mind.")
    noted = thoughts("记住。" if zh else "Noted.", minded[0].format(told.what), minded[1], zh=zh)
    return [said("told", told.statement, noted, told.reply, zh=zh), *between, _asked(told, zh)]


def hidden(rng: Random, zh: bool, sentences: int) -> list[Turn]:
    """One to four facts somewhere in a text, and a question about each."""
    facts = list({told.what: told for told in (fact(rng, zh) for _ in range(rng.randint(1, 4)))}.values())
    text = values.filler(rng, sentences)
    for told in facts:
        text.insert(rng.randint(0, len(text)), told.statement)
    rng.shuffle(facts)
    first, *others = facts
    return [_asked(first, zh, " ".join((*text, first.question))), *(_asked(told, zh) for told in others)]


def _asked(told: Fact, zh: bool, prompt: str = "") -> Turn:
    asked = ("用户问{}。", "前面说过。") if zh else ("The user asks for the {}.", "It was said before.")
    short = f"{told.what}。" if zh else f"{told.what.capitalize()}."
    mind = thoughts(short, asked[0].format(told.what), asked[1], zh=zh)
    return said("recall", prompt or told.question, mind, told.answer, (told.value,), told.statement, zh=zh)
