"""GBNF, the grammars of llama.cpp that SGLang and vLLM take, as llguidance's Lark. [R35]

    root ::= "Hi " name+          content: rule_0
    name ::= [A-Z] [a-z]*    ──>  rule_0: "Hi " TERMINAL_1 +
                                  TERMINAL_1: /[\\u{41}-\\u{5a}]/ /[\\u{61}-\\u{7a}]/ *

Token by token and without recursion: the source is a client's, and the time it takes is linear in it. A rule without
rules in it becomes a terminal, which the engine matches as one expression.
"""

import re
from collections.abc import Iterator

import msgspec

from glm53d.errors import InvalidRequest

_ESCAPE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[nrt]|[^A-Za-z0-9])"
_TOKEN = re.compile(
    rf"""(?P<blank>\s+|\#[^\n]*)
    |(?P<head>[A-Za-z_][A-Za-z0-9_-]*)(?=\s*::=)
    |(?P<is>::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |"(?P<text>(?:[^"\\\n]|{_ESCAPE})*)"
    |\[(?P<set>\^?(?:[^\]\\\n]|{_ESCAPE})+)\]
    |(?P<any>\.)
    |(?P<operator>[|()*+?]|\{{[0-9]*(?:,[0-9]*)?\}})""",
    re.VERBOSE,
)
_CHARACTER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_EMPTY = '""'
_NAMED = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}


def to_lark(source: str, at: str) -> str:
    """The grammar in Lark, its first rule `content`. Raises InvalidRequest with the path `at`."""
    rules: dict[str, list[tuple[str, bool]]] = {}  # what each is made of, in Lark, and whether that is a rule's name
    body: list[tuple[str, bool]] | None = None
    for kind, part in _parts(source, at):
        if kind == "head":
            if part in rules:
                raise InvalidRequest(f"`{at}`: the rule {part} is there twice.", at)
            body = rules[part] = []
        elif body is None:
            raise InvalidRequest(f'`{at}`: a grammar begins with a rule, such as root ::= "a".', at)
        else:
            body.append((part, kind == "name"))
    if "root" not in rules:
        raise InvalidRequest(f"`{at}`: the grammar has no rule root.", at)
    # Lark tells rules from terminals by their case, and has fewer characters for names.
    names = {
        name: f"rule_{i}" if name == "root" or any(is_rule for _, is_rule in parts) else f"TERMINAL_{i}"
        for i, (name, parts) in enumerate(rules.items())
    }
    lines = [f"content: {names['root']}"]
    for name, parts in rules.items():
        for part, is_rule in parts:
            if is_rule and part not in names:
                raise InvalidRequest(f"`{at}`: the grammar has no rule {part}.", at)
        said = " ".join(names[part] if is_rule else part for part, is_rule in parts)
        lines.append(f"{names[name]}: {said or _EMPTY}")
    return "\n".join(lines) + "\n"


def _parts(source: str, at: str) -> Iterator[tuple[str, str]]:
    """The tokens of a source: their kind and what they are in Lark; a name and the head of a rule are the name."""
    end = 0
    while end < len(source):
        found = _TOKEN.match(source, end)
        if found is None:
            line = source.count("\n", 0, end) + 1
            raise InvalidRequest(f"`{at}`: line {line} cannot be read from {source[end : end + 20]!r} on.", at)
        end, kind = found.end(), found.lastgroup
        assert kind is not None  # each alternative is a group
        said = found[kind]
        if kind == "text":
            said = msgspec.json.encode("".join(char for char, _ in _characters(said, at))).decode()
        elif kind == "set":
            said = f"/[{_set(said, at)}]/"
        elif kind == "any":
            said = "/(?s:.)/"
        if kind not in ("blank", "is"):
            yield kind, said


def _set(text: str, at: str) -> str:
    """What stands between the brackets of a set, as the engine has it: nothing but numbers means anything there."""
    out = "^" if text.startswith("^") else ""
    members = list(_characters(text.removeprefix("^"), at))
    for i, (char, is_escaped) in enumerate(members):
        is_range = char == "-" and not is_escaped and 0 < i < len(members) - 1
        out += "-" if is_range else f"\\u{{{ord(char):x}}}"
    return out


def _characters(text: str, at: str) -> Iterator[tuple[str, bool]]:
    """The characters of a text or a set, and whether each was written as an escape."""
    for found in _CHARACTER.finditer(text):
        written = found[0]
        if len(written) <= 2:
            char = _NAMED.get(written, written[-1])
        else:
            number = int(written[2:], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise InvalidRequest(f"`{at}`: {written} is no character.", at)
            char = chr(number)
        yield char, len(written) > 1
