"""Tools to call, requests for them, and their results. Half of the names exist nowhere else: they must be read.

A tool is known by what it does. Its name, its parameters' names and its description vary, so that the model learns to
find the tool in the prompt and to copy what is written there.
"""

import json
from dataclasses import dataclass
from random import Random

from bench.nano import values
from bench.nano.chats import Json, Turn, said, thoughts


@dataclass(frozen=True, slots=True)
class Kind:
    """What a tool does. asks have its parameters in braces, by position."""

    names: tuple[str, ...]
    description: str  # its last word is no other kind's: by this it is found, also in a description that goes on
    parameters: tuple[tuple[str, str], ...]  # names it may have, space-separated; and the kind of value
    asks: tuple[str, ...]
    zh_asks: tuple[str, ...]


KINDS = (
    Kind(("get_weather", "weather", "get_current_weather"), "Get the weather", (("city location place", "place"),),
         ("What is the weather in {0}?", "How is the weather in {0} today?", "Weather in {0}", "What's the weather like in {0}?",
          "Is it raining in {0}?"), ("{0}天气怎么样？", "{0}今天天气如何？", "查一下{0}的天气")),
    Kind(("get_time", "current_time"), "Get the current time", (("city location timezone", "place"),),
         ("What time is it in {0}?", "Tell me the time in {0}", "Current time in {0}?"), ("{0}现在几点？", "{0}的时间是多少？")),
    Kind(("search", "web_search", "search_web"), "Search the web", (("query q text", "phrase"),),
         ("Search for {0}", "Look up {0}", "Search the web for {0}", "Find {0} on the web"), ("搜索 {0}", "帮我搜索{0}", "上网查{0}")),
    Kind(("send_message", "message"), "Send a message", (("to recipient name", "name"), ("text message body", "phrase")),
         ("Send {0} the message: {1}", "Tell {0} this: {1}", "Message {0}: {1}"), ("给{0}发消息：{1}", "告诉{0}：{1}")),
    Kind(("send_email", "email"), "Send an email", (("to address email", "email"), ("subject title", "phrase")),
         ("Send an email to {0} with the subject {1}", "Email {0}, subject: {1}"), ("发邮件给 {0}，主题是{1}",)),
    Kind(("set_timer", "start_timer", "timer"), "Set a timer", (("minutes duration time", "int"),),
         ("Set a timer for {0} minutes", "Start a timer of {0} minutes", "Timer for {0} minutes, please"), ("设置 {0} 分钟的定时器", "定时{0}分钟")),
    Kind(("read_file", "open_file", "cat"), "Show a file's content", (("path file filename", "path"),),
         ("Read the file {0}", "Open {0}", "Show me the file {0}", "What is in {0}?"), ("读取文件 {0}", "打开 {0}")),
    Kind(("delete_file", "remove"), "Delete a file", (("path file filename", "path"),),
         ("Delete the file {0}", "Remove {0}", "Delete {0}, please"), ("删除文件 {0}", "删掉 {0}")),
    Kind(("run_command", "shell", "bash"), "Run a shell command", (("command cmd", "command"),),
         ("Run {0}", "Run the command {0}", "Execute {0}"), ("运行 {0}", "执行命令 {0}")),
    Kind(("play_music", "play"), "Play music", (("title song name", "phrase"),),
         ("Play {0}", "Play the song {0}", "I want to hear {0}"), ("播放{0}", "我想听{0}")),
    Kind(("add", "calculate_sum", "sum"), "Compute a sum", (("a x first", "int"), ("b y second", "int")),
         ("Add {0} and {1}", "What is {0} + {1}?", "Sum of {0} and {1}"), ("{0}加{1}是多少？", "计算 {0} + {1}")),
    Kind(("multiply", "product"), "Compute a product", (("a x first", "int"), ("b y second", "int")),
         ("Multiply {0} by {1}", "What is {0} * {1}?", "What is {0} times {1}?"), ("{0}乘以{1}是多少？", "计算 {0} * {1}")),
    Kind(("translate", "translate_text"), "Translate a text", (("text source", "phrase"), ("language target to", "language")),
         ("Translate {0} into {1}", "Translate into {1}: {0}", "How do you say {0} in {1}?"), ("把{0}翻译成 {1}",)),
    Kind(("book_flight", "find_flights", "flights"), "Find flights", (("from origin source", "place"), ("to destination", "place")),
         ("Find a flight from {0} to {1}", "I want to fly from {0} to {1}", "Flights from {0} to {1}"), ("查从{0}到{1}的航班", "我要从{0}飞到{1}")),
    Kind(("create_event", "add_event"), "Create a calendar event", (("title name event", "phrase"), ("date day", "date")),
         ("Create an event {0} on {1}", "Put {0} into my calendar on {1}"), ("在 {1} 创建日程{0}",)),
    Kind(("turn_on", "switch_on", "light_on"), "Turn on a light", (("room location", "noun"),),
         ("Turn on the light in the {0}", "Switch on the {0} light"), ("打开{0}的灯",)),
    Kind(("convert", "convert_currency"), "Convert money", (("amount value", "int"), ("currency to", "currency")),
         ("Convert {0} dollars to {1}", "How much is {0} dollars in {1}?"), ("把 {0} 美元换成 {1}",)),
    Kind(("get_user", "find_user", "lookup_user"), "Look up a user", (("id user_id user", "code"),),
         ("Look up user {0}", "Who is user {0}?", "Find the user {0}"), ("查找用户 {0}",)),
)  # fmt: skip
ENDS, PLAIN_ENDS = ("", "."), 0.6
TAILS = (
    " for you", " and return it", " at once.", " of a city", " in a given location.", " by name", " by its id.",
    " for the user", " and show it to the user.", " with the given arguments", " from the system", " using {word}.",
)  # fmt: skip
THINGS = (
    "price status size owner color address schedule balance version population history rating score age height".split()
)
VERBS = "get find show fetch check read".split()
LANGUAGES = "French German Spanish Italian Chinese Japanese English".split()
CURRENCIES = "euros yen pounds francs yuan".split()
COMMANDS = "ls pwd whoami make date uptime".split()
ARGUMENTS = "-l -a test {path} --help {word}".split()


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of a conversation: a kind with its names chosen."""

    kind: Kind
    name: str
    parameters: tuple[tuple[str, str], ...]  # name and kind of value
    described: bool
    schema: Json


def tool(rng: Random, kind: Kind) -> Tool:
    """A kind with names, some of them made up, and its description as people write them."""
    name = rng.choice(kind.names) if rng.random() < 0.5 else _made_up(rng)
    named: dict[str, str] = {}
    properties: dict[str, Json] = {}
    for names, of in kind.parameters:
        options = [option for option in names.split() if option not in named] or [values.word(rng)]
        parameter = rng.choice(options) if rng.random() < 0.75 else values.word(rng)
        named[parameter] = of
        properties[parameter] = {"type": "integer" if of == "int" else "string"}
        if rng.random() < 0.2:
            properties[parameter]["description"] = f"The {options[0]}"
    function: Json = {"name": name}
    if rng.random() < 0.85:
        tail = rng.choice(ENDS if rng.random() < PLAIN_ENDS else TAILS).format(word=values.word(rng))
        function["description"] = kind.description + tail
    parameters: Json = {"type": "object", "properties": properties}
    if rng.random() < 0.6:
        parameters["required"] = list(properties)
    function["parameters"] = parameters
    return Tool(kind, name, tuple(named.items()), "description" in function, {"type": "function", "function": function})


def toolbox(rng: Random) -> list[Tool]:
    """One to four tools that do different things and have different names."""
    number = rng.choices((1, 2, 3, 4), (0.25, 0.35, 0.25, 0.15))[0]
    kinds = [kind if rng.random() < 0.7 else _looked_up(rng.choice(THINGS), rng) for kind in rng.sample(KINDS, number)]
    by_name = {made.name: made for made in (tool(rng, kind) for kind in kinds)}
    by_use = {made.kind.description: made for made in by_name.values()}
    return list(by_use.values())


def drill(rng: Random) -> tuple[list[Tool], list[tuple[str, Tool | None]]]:
    """Tools described in any words, and each description once, to find among them; some more are not there."""
    kinds = [_any_kind(rng) for _ in range(rng.randint(3, 8))]
    by_name = {made.name: made for made in (tool(rng, kind) for kind in kinds)}
    by_use = {made.kind.description: made for made in by_name.values()}
    asked: list[tuple[str, Tool | None]] = [(use, made) for use, made in by_use.items() if made.described]
    absent = {_any_kind(rng).description for _ in range(rng.randint(1, 3))} - by_use.keys()
    asked += [(use, None) for use in sorted(absent)]
    rng.shuffle(asked)
    return list(by_use.values()), asked


def _any_kind(rng: Random) -> Kind:
    if rng.random() < 0.4:
        return rng.choice(KINDS)
    if rng.random() < 0.3:
        return _looked_up(rng.choice(THINGS), rng)
    parameters = tuple((values.word(rng), rng.choice(("int", "value"))) for _ in range(rng.randint(1, 3)))
    return Kind((_made_up(rng),), values.phrase(rng, False, 4), parameters, (), ())


def call(rng: Random, chosen: Tool, zh: bool) -> Turn:
    """A request for this tool. What is wanted is thought first, in the words of the description: these are found
    among the tools, or are not, and the name is the one beside them. A tool that is asked for by name is thought so.
    """
    shown = [_value(rng, of, zh) for _, of in chosen.parameters]
    arguments: Json = {
        name: int(text) if of == "int" else text for (name, of), text in zip(chosen.parameters, shown, strict=True)
    }
    wanted, said = chosen.kind.description, f"`{chosen.name}`"
    is_named = not chosen.described or rng.random() < 0.15  # the only way to know what to call
    if is_named:
        given = ("，" if zh else ", ").join(shown)
        asks: tuple[str, ...] = (f"用 {chosen.name} 处理 {given}",) if zh else (
            f"Use {chosen.name} with {given}", f"Call {chosen.name} on {given}")  # fmt: skip
        text = rng.choice(asks)
    else:
        text = rng.choice(chosen.kind.zh_asks if zh else chosen.kind.asks).format(*shown)
    listed = ", ".join(f"`{name}`" for name, _ in chosen.parameters)
    if zh:
        short, what = (f"{said}。", f"我需要调用 {said}。") if is_named else (
            f"{wanted}。", f"{wanted}：我需要调用 {said}。")  # fmt: skip
        mind = thoughts(short, what, f"参数是 {listed}。", zh=True)
    else:
        short, what = (f"Call {said}.", f"I need to call {said}.") if is_named else (
            f"{wanted}.", f"{wanted}: I need to call {said}.")  # fmt: skip
        mind = thoughts(short, what, f"It takes {listed}.")
    text = values.typeset(text) if zh else text
    message: Json = {"role": "user", "content": text}
    copied = (chosen.name,) if is_named else ()
    return Turn("tool", message, mind, "", (chosen.name, arguments), zh, copied)


def no_call(rng: Random, tools: list[Tool], zh: bool) -> Turn:
    """A request for what none of these tools does."""
    used = {made.kind.description for made in tools}
    kind = _looked_up(rng.choice(THINGS), rng) if tools and rng.random() < 0.3 else rng.choice(KINDS)
    if kind.description in used:
        return no_call(rng, tools, zh)
    shown = [_value(rng, of, zh) for _, of in kind.parameters]
    text = rng.choice(kind.zh_asks if zh else kind.asks).format(*shown)
    wanted = kind.description
    if zh:
        mind = thoughts(f"{wanted}。", f"{wanted}：没有合适的工具。", "我如实告诉用户。", zh=True)
        return said("no tool", text, mind, "我没有合适的工具。", zh=True)
    mind = thoughts(f"{wanted}.", f"{wanted}: I have no tool for this.", "I say so to the user.")
    return said("no tool", text, mind, "I have no tool for that.")


def result(rng: Random, zh: bool) -> Turn:
    """What the tool that was called gives, and the answer to the user."""
    roll = rng.random()
    if roll < 0.5:
        content = shown = values.phrase(rng, zh, 4)
        copied: tuple[str, ...] = (content,)
    else:
        keys = rng.sample((*THINGS, "temperature", "result", "condition", "name"), rng.randint(1, 3))
        fields = {key: rng.randint(-20, 999) if rng.random() < 0.5 else values.value(rng, zh) for key in keys}
        content = json.dumps(fields, ensure_ascii=False)
        shown = ("，" if zh else ", ").join(f"{key} {item}" for key, item in fields.items())
        copied = tuple(str(part) for field in fields.items() for part in field)
    if zh:
        mind = thoughts("有结果了。", "工具已经返回了结果。", "我把它告诉用户。", zh=True)
        answer = values.typeset(f"结果：{shown}")
    else:
        mind = thoughts("A result.", "The tool has given a result.", "I tell it to the user.")
        answer = f"The result: {shown}"
    return Turn("result", {"role": "tool", "content": content}, mind, answer, zh=zh, copied=copied)


def _looked_up(thing: str, rng: Random) -> Kind:
    verb = rng.choice(VERBS)
    return Kind(
        (f"{verb}_{thing}", f"{thing}_of", f"{thing}"), f"Get the {thing}", (("name item id object", "value"),),
        (f"What is the {thing} of {{0}}?", f"{verb.capitalize()} the {thing} of {{0}}", f"Tell me the {thing} of {{0}}"),
        (f"{{0}}的 {thing} 是什么？", f"查{{0}}的 {thing}"),
    )  # fmt: skip


def _made_up(rng: Random) -> str:
    form = rng.randrange(4)
    if form == 0:
        return f"{values.word(rng)}_{values.word(rng)}"
    if form == 1:
        return f"{rng.choice(VERBS)}_{values.word(rng)}"
    return values.word(rng) if form == 2 else f"{rng.choice(VERBS)}{values.word(rng).capitalize()}"


def _value(rng: Random, of: str, zh: bool) -> str:
    """A value as the prompt has it, which is how the call has it too."""
    match of:
        case "place":
            return values.place(rng, zh)
        case "name":
            return values.name(rng, zh)
        case "phrase":
            return values.phrase(rng, zh, 4)
        case "int":
            return str(rng.randint(1, 99) if rng.random() < 0.7 else rng.randint(100, 9999))
        case "path":
            return values.path(rng)
        case "email":
            return values.email(rng)
        case "code":
            return values.code(rng)
        case "noun":
            return rng.choice(values.ZH_NOUNS if zh else values.NOUNS)
        case "date":
            return f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        case "language":
            return rng.choice(LANGUAGES)
        case "currency":
            return rng.choice(CURRENCIES)
        case "command":
            ending = rng.choice(ARGUMENTS).format(path=values.path(rng), word=values.word(rng))
            return rng.choice(COMMANDS) + (f" {ending}" if rng.random() < 0.7 else "")
        case _:
            return values.value(rng, zh)
