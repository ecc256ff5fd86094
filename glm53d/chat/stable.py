"""Stable: what clients change from turn to turn is taken out of a conversation, so that its prompt only grows. [R44]

An agent's first system line may carry a value that is new in each request; one such line, and no cached page behind it
can be used again. System messages further down stay where they are: moved to the front they would do the same.
"""

from dataclasses import replace

from glm53d.chat.conversation import Conversation, Json


def without_lines(conv: Conversation, prefixes: tuple[str, ...]) -> Conversation:
    """The conversation without the lines that begin so at the head of its first messages, those of the system."""
    messages = conv.messages
    for i, message in enumerate(messages):
        if message.get("role") != "system":
            break
        content = _without(message.get("content"), prefixes)
        if content is not message.get("content"):
            messages = [*messages[:i], message | {"content": content}, *messages[i + 1 :]]
    return conv if messages is conv.messages else replace(conv, messages=messages)


def _without(content: Json, prefixes: tuple[str, ...]) -> Json:
    """A content, the same object when it has no such line. Parts are one text for this; an emptied one goes."""
    if isinstance(content, str):
        text = content
        while text.startswith(prefixes):
            text = text.partition("\n")[2]
        return content if len(text) == len(content) else text
    if not isinstance(content, list) or not content or not isinstance(content[0], dict):
        return content
    first = content[0].get("text")
    if content[0].get("type") != "text" or not isinstance(first, str):
        return content
    rest = _without(first, prefixes)
    if rest is first:
        return content
    return [content[0] | {"text": rest}, *content[1:]] if rest else _without(content[1:], prefixes)
