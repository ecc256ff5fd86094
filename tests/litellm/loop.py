"""A tool loop of LiteLLM's against a daemon, as `hosted_vllm/`: prints as JSON what it has understood.

Run by the Python that LiteLLM is installed for. Arguments: the daemon's URL, the model's name.
"""

import json
import sys
from typing import Any

import litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
url, name = sys.argv[1:]
request: dict[str, Any] = {
    "model": f"hosted_vllm/{name}", "api_base": f"{url}/v1", "api_key": "none", "tools": TOOLS, "num_retries": 0,
}  # fmt: skip


def said(answer: Any) -> dict[str, Any]:
    """What a turn was, for LiteLLM."""
    [choice] = answer.choices
    calls = [
        {"name": call.function.name, "arguments": call.function.arguments} for call in choice.message.tool_calls or ()
    ]
    reasoning = getattr(choice.message, "reasoning_content", None)
    usage = answer.usage
    return {
        "text": choice.message.content, "reasoning": reasoning, "calls": calls, "finish": choice.finish_reason,
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
    }  # fmt: skip


def turn(messages: list[Any], *, stream: bool) -> Any:
    """One answer; of a stream, what LiteLLM makes of its chunks."""
    if not stream:
        return litellm.completion(messages=messages, **request)
    chunks = litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **request)
    return litellm.stream_chunk_builder(list(chunks), messages=messages)


def loop(*, stream: bool) -> list[dict[str, Any]]:
    """Ask, call, answer."""
    messages: list[Any] = [{"role": "user", "content": f"Which files are there, streamed or not: {stream}?"}]
    first = turn(messages, stream=stream)
    message = first.choices[0].message
    messages.append(message)
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.txt"})
    return [said(first), said(turn(messages, stream=stream))]


print(json.dumps({"streamed": loop(stream=True), "plain": loop(stream=False)}))
