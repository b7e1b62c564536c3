"""What an engine hands to a model's chat template for a request: the same text comes out only if the same goes in.

Engines differ in small things (which fields of a message they know, in which order a tool is written), so it matters whose
request it is. What is not known to be the same raises CannotRender.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Dialect(StrEnum):
    """Whose way of reading a request."""

    VLLM = "vllm"
    SGLANG = "sglang"

    @classmethod
    def of(cls, owner: str | None) -> "Dialect":
        """By what an engine's list of models says of who owns a model."""
        return cls.SGLANG if owner == "sglang" else cls.VLLM


class CannotRender(Exception):
    """The request cannot be rendered here as its engine would; the message says what of it."""


_MESSAGE_FIELDS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"))
# Fields that change the prompt in a way that is the engine's own.
_ODD_FIELDS = (
    "chat_template", "documents", "continue_final_message", "add_special_tokens", "reasoning_effort", "functions",
    "mm_processor_kwargs", "truncate_prompt_tokens", "prompt_embeds",
)  # fmt: skip
_ODD_FIELDS_OF = {Dialect.VLLM: (), Dialect.SGLANG: ("input_ids", "reasoning", "thinking")}
_TOOL_FIELDS = ("name", "description", "parameters")


def odd_field(asked: Mapping[str, Any], dialect: Dialect) -> str:
    """A field of a request whose effect on the prompt is not known; "" if there is none."""
    return next((field for field in (*_ODD_FIELDS, *_ODD_FIELDS_OF[dialect]) if asked.get(field)), "")


def template_variables(asked: Mapping[str, Any], names: Mapping[str, str], dialect: Dialect) -> dict[str, Any]:
    """All that a chat template is rendered with.

    Args:
        asked: the body of a chat request.
        names: what the template knows the special tokens by.

    Raises CannotRender.
    """
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CannotRender("messages")
    more = asked.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise CannotRender("chat_template_kwargs")
    prompted = True if dialect is Dialect.SGLANG else asked.get("add_generation_prompt", True)
    return {
        **names,
        **more,
        "add_generation_prompt": prompted,
        "messages": [_message(each, dialect) for each in messages],
        "tools": _tools(asked, dialect),
    }


def _message(message: object, dialect: Dialect) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise CannotRender("a message without a role")
    made: dict[str, Any] = {"role": message["role"], "content": _content(message.get("content"))}
    for field, value in message.items():
        if field in ("role", "content") or value is None:
            continue
        if field not in _MESSAGE_FIELDS:
            raise CannotRender(f"messages[].{field}")
        made[field] = value
    if made["role"] == "developer":
        raise CannotRender("the role developer")
    if dialect is Dialect.SGLANG:
        made.pop("reasoning", None)
        if made["role"] == "user":
            return {"role": "user", "content": made["content"]}
    elif made["role"] == "assistant":
        thought = made.get("reasoning")
        if thought is None and "reasoning_content" in made:
            raise CannotRender("messages[].reasoning_content")
        if thought is not None:
            made["reasoning_content"] = thought
    if made["role"] == "assistant" and (calls := made.pop("tool_calls", None)):
        if not isinstance(calls, list):
            raise CannotRender("tool_calls")
        made["tool_calls"] = [_call(each) for each in calls]
    return made


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        if part.get("type") == "text" and isinstance(part.get("text"), str) and len(part) == 2:
            return str(part["text"])
    raise CannotRender("content that is not one text")


def _call(call: object) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates want them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise CannotRender("tool_calls")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    if not isinstance(arguments, dict):
        raise CannotRender("tool_calls[].function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(asked: Mapping[str, Any], dialect: Dialect) -> list[dict[str, Any]] | None:
    tools = asked.get("tools") or None
    if tools is None:
        return None
    if asked.get("tool_choice") == "none" or not isinstance(tools, list):
        raise CannotRender("tools")
    if dialect is Dialect.VLLM:
        return [_tool(each) for each in tools]
    if not isinstance(asked.get("tool_choice", "auto"), str):
        raise CannotRender("tool_choice")  # only that tool is shown
    return [_sglang_tool(each) for each in tools]


def _function(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or set(tool) - {"type", "function"}:
        raise CannotRender("tools")
    if set(function) - set(_TOOL_FIELDS):
        raise CannotRender("tools[].function")
    return function


def _tool(tool: object) -> dict[str, Any]:
    """vLLM writes the fields in an order of its own, those that are given."""
    function = _function(tool)
    return {"type": "function", "function": {field: function[field] for field in _TOOL_FIELDS if field in function}}


def _sglang_tool(tool: object) -> dict[str, Any]:
    """SGLang writes a function's fields as they were given, then those that were not, and a field of its own."""
    function = dict(_function(tool))
    for field in ("description", "name", "parameters"):
        function.setdefault(field, None)
    return {"type": "function", "function": function, "defer_loading": None}
