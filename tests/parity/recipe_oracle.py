"""The referee (the official wheel `deepseek-recipe`) and ours, side by side: both sides as plain comparable data."""

import deepseek_recipe as official
from headrace.recipe import DEFAULT_TOKENS, Conversation, ImageSource, Message, SpecialTokens, ToolCall, ToolDefinition
from headrace.recipe.render import template

_SOURCES = {"url": official.UrlImageSource, "data_url": official.DataUrlImageSource, "bytes": official.BytesImageSource}
_TEMPLATES = {version: template(version, DEFAULT_TOKENS) for version in ("v4", "v41")}


def conversation_pair(spec: dict) -> tuple[Conversation, official.Conversation]:
    """One conversation written as data, built for both sides."""
    settings = {k: spec[k] for k in ("thinking_mode", "tool_choice", "reasoning_effort") if k in spec}
    formats = {k: spec[k] for k in ("response_format", "response_schema", "response_regex") if spec.get(k) is not None}
    theirs = official.Conversation(
        [_their_message(m) for m in spec["messages"]],
        tools=[official.ToolDefinition(**t) for t in spec.get("tools") or []], **settings, **formats,
    )
    if "response_schema" in formats:
        formats["response_format"] = "json_schema"
    elif "response_regex" in formats:
        formats["response_format"] = "regex"
    ours = Conversation(
        [_our_message(m) for m in spec["messages"]],
        tools=[ToolDefinition(**t) for t in spec.get("tools") or []], **settings, **formats,
    )
    return ours, theirs


def render_ours(version: str, conversation: Conversation, tokens: SpecialTokens | None = None) -> dict:
    """Our prompt as data."""
    rendered = (template(version, tokens) if tokens else _TEMPLATES[version]).render(conversation)
    return {
        "prompt": rendered.prompt,
        "special_ranges": rendered.special_ranges,
        "images": [s.value for s in rendered.image_sources],
    }


def render_theirs(version: str, conversation: official.Conversation) -> dict:
    """The referee's prompt as data."""
    encoding = official.DeepseekV4Encoding() if version == "v4" else official.DeepseekV41Encoding()
    rendered = encoding.render_conversation(conversation)
    return {
        "prompt": rendered.prompt,
        "special_ranges": rendered.special_ranges,
        "images": [s.url or s.data_url or s.data for s in rendered.image_sources],
    }


def _our_message(m: dict) -> Message:
    calls = m.get("tool_calls")
    tools = m.get("tools")
    return Message(
        m["role"], m["content"], m.get("reasoning_content"),
        None if calls is None else [ToolCall(**c) for c in calls], m.get("tool_call_id"),
        [ImageSource("url", i["url"]) for i in m.get("images") or []], m.get("prefix", False),
        None if tools is None else [ToolDefinition(**t) for t in tools],
    )


def _their_message(m: dict) -> official.Message:
    role, content = m["role"], m["content"]
    images = [official.UrlImageSource(i["url"]) for i in m.get("images") or []]
    if role == "system":
        tools = m.get("tools")
        return official.SystemMessage(content, images, None if tools is None else
                                      [official.ToolDefinition(**t) for t in tools])
    if role == "user":
        return official.UserMessage(content, images)
    if role == "tool":
        return official.ToolMessage(content, m.get("tool_call_id"), images)
    if role == "latest_reminder":
        return official.LatestReminderMessage(content)
    calls = m.get("tool_calls")
    calls = None if calls is None else [official.ToolCall(**c) for c in calls]
    return official.AssistantMessage(content, m.get("reasoning_content"), calls, m.get("prefix", False))
