"""Conversation: messages, tools and options, of no dialect. Every dialect makes one; the template renders it."""

from dataclasses import dataclass, field
from typing import Any

Json = Any
"""A value as msgspec.json decodes it: dict, list, str, int, float, bool or None."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt in the model's own terms.

    messages: dicts with `role` in user, assistant, system, tool (a dialect has mapped the others) and `content`: a str,
    None or a list of parts ({"type": "text", "text": ...} or a media part). An assistant message may have
    `reasoning_content` (str) and `tool_calls` ([{"id", "type", "function": {"name", "arguments": dict}}]); a tool
    message has `tool_call_id`. tools: [{"type": "function", "function": {...}}] or bare functions; None or [] is no
    tools.
    """

    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]] | None = None
    reasoning_effort: str | None = None  # low, high; all else is max
    clear_thinking: bool = False
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Json] = field(default_factory=dict)  # for a user's own template
