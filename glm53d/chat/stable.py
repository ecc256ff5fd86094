"""Stable: what clients change from turn to turn is taken out of a conversation, so that its prompt only grows. [R44]

An agent's first system line may carry a value that is new in each request; one such line, and no cached page behind it
can be used again. System messages further down stay where they are: moved to the front they would do the same.
"""

from dataclasses import replace

from glm53d.chat.conversation import Conversation, Json


def without_lines(conv: Conversation, prefixes: tuple[str, ...]) -> Conversation:
    """The conversation without the lines that begin so at the head of its first messages, those of the system."""
    changed: dict[int, dict[str, Json]] = {}
    for i, message in enumerate(conv.messages):
        if message.get("role") != "system":
            break
        content = _without(message.get("content"), prefixes)
        if content is not message.get("content"):
            changed[i] = message | {"content": content}
    if not changed:
        return conv
    return replace(conv, messages=[changed.get(i, message) for i, message in enumerate(conv.messages)])


def _without(content: Json, prefixes: tuple[str, ...]) -> Json:
    """A content, the same object when it has no such line. Parts are one text for this; an emptied one goes."""
    if isinstance(content, str):
        return content[_begin(content, prefixes) :]
    if not isinstance(content, list):
        return content
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(text := part.get("text"), str):
            return content[i:] if i else content
        begin = _begin(text, prefixes)
        if begin < len(text) or not text:
            return [part | {"text": text[begin:]}, *content[i + 1 :]] if i or begin else content
    return [] if content else content


def _begin(text: str, prefixes: tuple[str, ...]) -> int:
    """Where the text begins behind such lines."""
    at = 0
    while text.startswith(prefixes, at):
        at = text.find("\n", at) + 1
        if not at:
            return len(text)
    return at
