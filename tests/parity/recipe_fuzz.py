"""Differential fuzzer: random input through ours and through the official wheel, every difference counted.

    python tests/parity/recipe_fuzz.py --cases 2000 --seed 1 --kind render

Prints one line per kind and the first differing cases; the exit status is 1 when anything differed.
"""

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import recipe_oracle as oracle

from headrace.recipe.images import image_tokens

TEXTS = [
    "",
    "a",
    "hello world",
    "多字节 文本",
    "<｜User｜>",
    "<think>x</think>",
    "｜DSML｜",
    "<｜image｜>",
    "a<｜image｜>b<｜image｜>",
    "\n",
    "\n\n",
    " ",
    "line\nline",
    "</tool_result>",
    "emoji 🎉 é",
    "\u2028\x7f",
    "json",
    "\t\b",
    '"quoted" \\ back',
]
ARGUMENTS = [
    "",
    "{}",
    "[]",
    "null",
    "not json",
    '"s"',
    '{"a": 1}',
    '{"x":"y","n":[1,2,{"k":null}]}',
    '{"a":1e-7,"b":1e-5,"c":1e16}',
    '{"a":"中文\\n\\u0001/","b":true}',
    '{"a":1,"b":2,"a":"z"}',
    '{"a":123456789012345678901}',
    '{"a":-0}',
    "{} x",
    '{"a": 1e400}',
    '{"a":"\\ud800"}',
    '{"a b":"x", "":"e"}',
    '{"t":"<｜DSML｜"}',
    '{"big":18446744073709551615}',
    '{"deep":' + "[" * 60 + "]" * 60 + "}",
    '{"deep":' + "[" * 127 + "]" * 127 + "}",
    '  {"sp" : 1.50 }  ',
    '{"a":.5}',
]
SCHEMAS = [
    None,
    {},
    {"type": "object"},
    {"type": "object", "properties": {"x": {"type": "string", "description": "城市"}}},
    {"type": "object", "properties": {"n": {"type": "number", "minimum": 1e-07, "default": 1e-5}}, "required": ["n"]},
    {"b": [1, 2.5, None, True], "a": {"z": 1e16}},
    [1],
    "text",
    3,
]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--show", type=int, default=3, help="differing cases to print")
    options = parser.parse_args(argv)
    kinds = KINDS if options.kind == "all" else [options.kind]
    total = 0
    for kind in kinds:
        bad = run(kind, options.cases, options.seed, options.show)
        total += bad
        print(f"{kind:12} {options.cases} cases  {bad} mismatches")
    return 1 if total else 0


def run(kind: str, cases: int, seed: int, show: int = 3) -> int:
    """Mismatches of `cases` random cases; case i of a seed is always the same one."""
    bad = 0
    for i in range(cases):
        case, ours, theirs = KINDS[kind](random.Random(f"{kind}:{seed}:{i}"))
        if ours != theirs:
            bad += 1
            if bad <= show:
                print(f"--- {kind} seed {seed} case {i}: {json.dumps(case, ensure_ascii=False, default=repr)[:3000]}")
                print(f"  ours   {difference(ours, theirs)}\n  theirs {difference(theirs, ours)}")
    return bad


def difference(one, other) -> str:
    """`one`, cut to where it starts to differ from `other`."""
    a, b = (json.dumps(x, ensure_ascii=False, default=repr) for x in (one, other))
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[max(0, at - 160) : at + 240]


def render_case(rng: random.Random) -> tuple:
    version = rng.choice(["v4", "v41"])
    spec = conversation(rng)
    ours, theirs = oracle.conversation_pair(spec)
    return (version, spec), oracle.render_ours(version, ours), oracle.render_theirs(version, theirs)


def conversation(rng: random.Random) -> dict:
    """A conversation as data, with the odd orders that clients send."""
    spec = {
        "messages": [message(rng) for _ in range(rng.choice([0, 1, 1, 2, 3, 4, 6, 9]))],
        "thinking_mode": rng.random() < 0.6,
        "tool_choice": rng.choice(["auto", "auto", "none", "required"]),
        "reasoning_effort": rng.choice([None, None, "low", "high", "xhigh", "max"]),
    }
    if rng.random() < 0.4:
        spec["tools"] = [tool(rng) for _ in range(rng.randint(1, 3))]
    form = rng.random()
    if form < 0.15:
        spec["response_format"] = "json_object"
    elif form < 0.3:
        spec["response_schema"] = rng.choice([s for s in SCHEMAS if s is not None])
    elif form < 0.35:
        spec["response_regex"] = "a+"
    return spec


def message(rng: random.Random) -> dict:
    role = rng.choice(["system", "user", "user", "assistant", "assistant", "tool", "tool", "latest_reminder"])
    result = {"role": role, "content": "".join(rng.choice(TEXTS) for _ in range(rng.choice([0, 1, 1, 2])))}
    if role in ("system", "user", "tool") and rng.random() < 0.25:
        result["images"] = [{"url": f"http://h/{rng.randint(0, 99)}"} for _ in range(rng.randint(1, 3))]
    if role == "system" and rng.random() < 0.3:
        result["tools"] = [tool(rng) for _ in range(rng.randint(0, 2))]
    if role == "tool":
        result["tool_call_id"] = rng.choice([None, "", *"abcd"])
    if role == "assistant":
        result["reasoning_content"] = rng.choice([None, None, "", "r", "think\n"])
        result["prefix"] = rng.random() < 0.15
        result["tool_calls"] = rng.choice([None, None, [tool_call(rng) for _ in range(rng.randint(0, 3))]])
    return result


def tool_call(rng: random.Random) -> dict:
    return {
        "id": rng.choice([*"abcd", ""]),
        "name": rng.choice(["f", "get_weather", 'q"', ""]),
        "arguments": rng.choice(ARGUMENTS),
    }


def tool(rng: random.Random) -> dict:
    return {
        "name": rng.choice(["f", "get_weather", "工具"]),
        "description": rng.choice([None, "", "does it", "多\n行"]),
        "parameters": rng.choice(SCHEMAS),
        "strict": rng.choice([None, True, False]),
        "defer_loading": rng.random() < 0.2,
    }


WORDS = [
    "a",
    "hello",
    " world",
    "\n",
    "\n\n",
    "\n\n\n",
    "<",
    "</",
    "é",
    "🎉",
    "中文",
    '"',
    " ",
    "{",
    "}",
    "[",
    "```",
    "json",
    "END",
    "EN",
    "2 < 3",
    "<b>",
    "\\",
    "\t",
    "<th",
    "E",
    "N",
    "D",
]
MARKERS = {
    "think": ["</think>", "<think>", "\n</think>\n", "</think>\n\n"],
    "json": ["```json\n", "```\n", "\n```", '{"a": 1}', "[1]", "```", "json\n"],
    "dsml": [
        "｜DSML｜",
        "<｜DSML｜",
        "</｜DSML｜",
        "\n\n<｜DSML｜ calls>\n",
        '<｜DSML｜ invoke name="f">\n',
        'invoke name="',
        '<｜DSML｜ invoke name="apply_patch">',
        '<｜DSML｜ invoke name="tool_search">',
        '<｜DSML｜ invoke name="ns::get">',
        'parameter name="input" string="true">',
        'parameter name="input" string="false">',
        "</｜DSML｜ invoke>\n",
        "</｜DSML｜ calls>",
        "</｜DSML｜tool_calls>",
        "parameter name=",
        ' string="true">',
        ' string="false">',
        "</｜DSML｜ parameter>\n",
        '<｜DSML｜ parameter name="k" string="true">',
        '<｜DSML｜ parameter name="n" string="false">',
        "123",
        'string="true">',
        '"a b"',
        '">',
        "invoke",
        "parameter",
    ],
}


def output_text(rng: random.Random) -> str:
    """What a model might write, well formed or not."""
    parts = []
    for _ in range(rng.choice([1, 2, 4, 8, 16, 30])):
        draw = rng.random()
        if draw < 0.45:
            parts.append(rng.choice(WORDS))
        elif draw < 0.6:
            parts.append(rng.choice(MARKERS["think"]))
        elif draw < 0.7:
            parts.append(rng.choice(MARKERS["json"]))
        elif draw < 0.95:
            parts.append(rng.choice(MARKERS["dsml"]))
        else:
            gap = rng.choice([" ", ""])
            parts.append(
                f'\n\n<｜DSML｜{gap}calls>\n<｜DSML｜{gap}invoke name="get">\n<｜DSML｜{gap}parameter name="city" '
                f'string="true">Pa"ris\n<b></｜DSML｜{gap}parameter>\n<｜DSML｜{gap}parameter name="n" string="false">'
                f"[1, 2]</｜DSML｜{gap}parameter>\n</｜DSML｜{gap}invoke>\n</｜DSML｜{gap}calls>"
            )
    return "".join(parts)


def cut(rng: random.Random, items) -> list:
    """`items` in consecutive pieces."""
    pieces, at, longest = [], 0, rng.choice([1, 2, 3, 7, 30, 1000])
    while at < len(items):
        step = rng.randint(1, longest)
        pieces.append(items[at : at + step])
        at += step
    return pieces


def stream_spec(rng: random.Random) -> dict:
    text = output_text(rng)
    spec = {
        "tools": rng.random() < 0.7,
        "in_tools": rng.random() < 0.1,
        "json": rng.random() < 0.2,
        "stage": rng.choice(
            [None, None, "reasoning_start", "reasoning_start", "reasoning_continuation", "content_continuation"]
        ),
        "stops": rng.choice([[], [], ["END"], ["EN", "END"], ["\n\n", "ND"], ["<b", "a"], ["é", "hello world"], ["\n"]]),
        "custom": rng.random() < 0.3,
        "include_usage": rng.random() < 0.2,
        "reason": rng.choice(["stop", "stop", "stop", "length", "content_filter"]),
        "ids": None,
        "texts": None,
    }
    if rng.random() < 0.5:
        spec["texts"] = cut(rng, text)
        return spec
    ids = oracle.tokenizers()[0].encode(text)
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 3)):
            ids.insert(
                rng.randint(0, len(ids)), rng.choice([53153, 234, 1, 128803, 999999, 239, 128821, rng.randint(0, 128000)])
            )
    spec["ids"] = cut(rng, ids)
    if rng.random() < 0.3:
        spec["logprobs"] = [
            [(-rng.random() * 3, [(rng.randint(0, 128999), -rng.random()) for _ in range(rng.randint(0, 2))]) for _ in piece]
            for piece in spec["ids"]
        ]
    return spec


def stream_case(protocol: str) -> Callable[[random.Random], tuple]:
    def case(rng: random.Random) -> tuple:
        spec = stream_spec(rng)
        return (protocol, spec), oracle.stream_ours(protocol, spec), oracle.stream_theirs(protocol, spec)

    return case


MODELS = ["DeepSeek-V4.1-Flash", "DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro"]
STRING = {"type": "string"}
STRICT_SCHEMAS = [
    {"type": "object", "properties": {"a": STRING}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": STRING, "b": {"type": "integer", "minimum": 1}}},
    {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [STRING, {"type": "null"}]}, "minItems": 1}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": STRING}},
    {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"type": ["string", "null"]}}}},
        "description": "d",
    },
    {"type": "object"},
    {"type": "object", "properties": {}},
    {"type": "string"},
    {},
    {"type": "object", "properties": {"a": {"type": "foo"}}},
    {"type": "object", "properties": {"a": {"type": "array"}}},
    {"type": "object", "properties": {"a": STRING}, "required": ["b"]},
    {"type": "object", "properties": {"a": STRING}, "additionalProperties": True},
    {"type": "object", "properties": {"a": {"type": "number", "enum": [1], "maximum": 2.5, "default": 1}}},
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2.5}}},
    {"anyOf": [STRING]},
    True,
    {"type": "object", "properties": {"a": {"enum": ["x"]}}},
]
PLAIN_SCHEMAS = [
    *STRICT_SCHEMAS[:8],
    {"type": "object", "required": "x"},
    {"type": "object", "required": ["a", "a"]},
    {"type": "object", "properties": {"a": 1}},
    {"type": "object", "properties": []},
    {"type": "object", "enum": 1},
    {"type": "object", "minProperties": -1},
    {"type": "object", "anyOf": []},
    {"type": ["object"]},
    {"type": "object", "description": 1},
    {"type": "object", "properties": {"n": {"type": "number", "minimum": 1e-07, "multipleOf": 0}}},
    5,
    "x",
    [],
    {"type": "object", "x": 1e-7},
]
WRONG = [None, True, 0, 1, -1, 1.5, 2**33, "", "x", {}, {"x": 1}, ["x"], [1], []]


def maybe(rng: random.Random, chance: float, target: dict, key: str, values: list) -> None:
    if rng.random() < chance:
        target[key] = rng.choice(values)


def request_tool(rng: random.Random) -> dict:
    function = {
        "name": rng.choice(
            ["f", "g", "get_weather", "h", "a-b", "bad name", ""] if rng.random() < 0.1 else ["f", "g", "h", "k"]
        )
    }
    maybe(rng, 0.5, function, "description", ["d", "", None, "中文"])
    maybe(rng, 0.15, function, "strict", [True, False, None])
    if function.get("strict"):
        maybe(rng, 0.8, function, "parameters", STRICT_SCHEMAS)
    else:
        maybe(rng, 0.7, function, "parameters", PLAIN_SCHEMAS if rng.random() < 0.2 else STRICT_SCHEMAS[:6])
    return {"type": "function", "function": function}


def chat_content(rng: random.Random, images: bool = True) -> str | list:
    if rng.random() < 0.7:
        return rng.choice([*TEXTS, "Answer in JSON", "q"])
    parts = []
    for _ in range(rng.randint(0, 3)):
        draw = rng.random()
        if draw < 0.6 or not images:
            parts.append({"type": "text", "text": rng.choice(TEXTS)})
        elif draw < 0.9:
            url = {
                "url": rng.choice(
                    ["http://a/b.png", "https://x", "data:image/png;base64,AAAA"]
                    + (["ftp://a", "data:text/plain,a", ""] if rng.random() < 0.1 else [])
                )
            }
            maybe(rng, 0.4, url, "detail", ["low", "high", "auto", "original", None])
            parts.append({"type": "image_url", "image_url": url})
        else:
            parts.append(
                {
                    "type": "file",
                    **rng.choice(
                        [
                            {},
                            {"file_id": "a"},
                            {"file_data": "data:image/png;base64,AA"},
                            {"file_data": "x"},
                            {"file_id": "a", "file_data": "b"},
                        ]
                    ),
                }
            )
    return parts


def chat_messages(rng: random.Random) -> list:
    messages: list = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8]) if rng.random() < 0.1 else rng.choice([1, 1, 2, 3, 5, 8])):
        role = rng.choice(["system", "user", "user", "assistant", "assistant", "latest_reminder", "calls"])
        if role == "latest_reminder":
            messages.append({"role": role, "content": rng.choice(TEXTS)})
        elif role in ("system", "user"):
            messages.append({"role": role, "content": chat_content(rng)})
        else:
            item: dict = {"role": "assistant", "content": chat_content(rng, images=rng.random() < 0.05)}
            maybe(rng, 0.5, item, "reasoning_content", ["r", "", None, "think\n"])
            maybe(rng, 0.05, item, "prefix", [True, False, None])
            maybe(rng, 0.05, item, "content", [None])
            messages.append(item)
            if role == "calls":
                ids = rng.sample(["c1", "c2", "a", "b"], rng.randint(1, 3))
                item["tool_calls"] = [
                    {
                        "id": i,
                        "type": "function",
                        "function": {"name": rng.choice(["f", "g"]), "arguments": rng.choice(ARGUMENTS)},
                    }
                    for i in ids
                ]
                maybe(rng, 0.5, item, "content", [None, ""])
                rng.shuffle(ids)
                messages += [{"role": "tool", "tool_call_id": i, "content": chat_content(rng)} for i in ids]
                if rng.random() < 0.1:
                    messages.pop() if rng.random() < 0.5 else messages.append(
                        {"role": "tool", "tool_call_id": rng.choice(["c1", "zz"]), "content": ""}
                    )
    if rng.random() < 0.1 and messages:
        messages.append({"role": "assistant", "content": rng.choice(["", "pre", "\n"]), "prefix": True})
        maybe(rng, 0.5, messages[-1], "reasoning_content", ["", "rr"])
    return messages


def chat_body(rng: random.Random) -> dict:
    body: dict = {"model": rng.choice(MODELS) if rng.random() < 0.98 else "nope", "messages": chat_messages(rng)}
    odd = 0.06
    maybe(rng, 0.4, body, "thinking", [{"type": t} for t in ("enabled", "adaptive", "disabled", "disabled")] + [None])
    maybe(rng, 0.3, body, "reasoning_effort", ["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max", None])
    maybe(rng, 0.3, body, "temperature", [0, 0.5, 1, 1.3, 2] + ([3, -1] if rng.random() < odd else []))
    maybe(rng, 0.3, body, "top_p", [0.1, 0.95, 0.97, 1] + ([0, 1.5] if rng.random() < odd else []))
    maybe(rng, 0.3, body, "max_tokens", [1, 64, 393216] + ([0, 393217] if rng.random() < odd else []))
    maybe(rng, 0.2, body, "stop", ["x", ["a", "b"], [], None] + (["", [""], ["x"] * 17] if rng.random() < odd else []))
    maybe(rng, 0.1, body, "seed", [0, 5, 2**63 - 1] + ([2**63] if rng.random() < odd else []))
    maybe(rng, 0.1, body, "n", [1, None] + ([2, 0] if rng.random() < odd else []))
    maybe(rng, 0.1, body, "presence_penalty", [0.5] + ([3] if rng.random() < odd else []))
    maybe(rng, 0.1, body, "frequency_penalty", [-1] + ([-3] if rng.random() < odd else []))
    maybe(rng, 0.15, body, "logprobs", [True, False])
    maybe(rng, 0.1, body, "top_logprobs", [0, 5, 20, 21])
    maybe(rng, 0.4, body, "stream", [True, False, None])
    maybe(rng, 0.1, body, "stream_options", [{"include_usage": True}, {}, None])
    if rng.random() < 0.35:
        body["tools"] = [request_tool(rng) for _ in range(rng.choice([0, 1, 1, 2]))]
    maybe(
        rng,
        0.3,
        body,
        "tool_choice",
        ["auto", "none", "required", {"type": "function", "function": {"name": rng.choice(["f", "zz"])}}],
    )
    form = rng.random()
    if form < 0.1:
        body["response_format"] = rng.choice([{"type": "text"}, {"type": "json_object"}, {"type": "regex", "regex": "a+"}])
    elif form < 0.25:
        is_strict = rng.choice([True, False, None])
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "schema": rng.choice(STRICT_SCHEMAS if is_strict else PLAIN_SCHEMAS),
                "strict": is_strict,
            },
        }
    maybe(rng, 0.1, body, "max_completion_tokens", [5, "x"])
    return body


def message_image(rng: random.Random) -> dict:
    bad = rng.random() < 0.05
    return {
        "type": "image",
        "source": rng.choice(
            [
                {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                {"type": "base64", "media_type": "image/jpg", "data": "AA=="},
                {"type": "url", "url": "http://a"},
                *(
                    [
                        {"type": "url", "url": "ftp://a"},
                        {"type": "file", "file_id": "x"},
                        {"type": "base64", "media_type": "image/png", "data": "A"},
                    ]
                    if bad
                    else []
                ),
            ]
        ),
    }


def message_part(rng: random.Random) -> dict:
    draw = rng.random()
    if draw < 0.7:
        return {"type": "text", "text": rng.choice(TEXTS)}
    if draw < 0.88:
        return message_image(rng)
    return {"type": "document", "source": rng.choice([{}, {"media_type": "application/pdf"}, {"type": "text", "data": "x"}])}


def message_blocks(rng: random.Random, low: int = 1) -> str | list:
    if rng.random() < 0.4:
        return rng.choice(TEXTS)
    if rng.random() < 0.02:
        low = 0
    return [message_part(rng) for _ in range(rng.randint(low, 3))]


def messages_body(rng: random.Random) -> dict:
    items: list = []
    for _ in range(rng.choice([0, 1, 2]) if rng.random() < 0.05 else rng.choice([1, 1, 2, 3, 5])):
        role = rng.choice(["user", "user", "assistant", "assistant", "system", "calls", "calls"])
        if role == "user":
            items.append({"role": "user", "content": message_blocks(rng)})
        elif role == "system":
            blocks = message_blocks(rng, 0)
            if isinstance(blocks, list) and rng.random() < 0.4:
                blocks.append(
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": rng.choice(["f", "g", "h", "k"])}}
                )
            items.append({"role": "system", "content": blocks})
        else:
            blocks = [{"type": "thinking", "thinking": rng.choice(["t", "", "more"])} for _ in range(rng.choice([0, 0, 1, 2]))]
            blocks += [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randint(0, 2))]
            if rng.random() < 0.03:
                blocks.append(message_part(rng))
            if rng.random() < 0.03:
                blocks += [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                ]
            ids = rng.sample(["a", "b", "c"], rng.randint(1, 3)) if role == "calls" else []
            blocks += [
                {
                    "type": "tool_use",
                    "id": i,
                    "name": "f",
                    "input": rng.choice([{}, {"k": 1.5, "é": "x\n"}, {"a": 1e-7}, "s", None, [1]]),
                }
                for i in ids
            ]
            if rng.random() < 0.02 and ids:
                blocks.append({"type": "tool_use", "id": ids[0], "name": "f", "input": {}})
            items.append({"role": "assistant", "content": blocks or "x"})
            if ids:
                rng.shuffle(ids)
                if rng.random() < 0.05:
                    ids.pop() if rng.random() < 0.5 else ids.append(rng.choice(["a", "zz"]))
                results: list = []
                for i in ids:
                    result: dict = {"type": "tool_result", "tool_use_id": i}
                    maybe(
                        rng,
                        0.8,
                        result,
                        "content",
                        [
                            message_blocks(rng),
                            "r",
                            None,
                            [
                                {"type": "text", "text": "x"},
                                {"type": "tool_reference", "tool_name": rng.choice(["f", "g", "h"])},
                            ],
                        ],
                    )
                    maybe(rng, 0.2, result, "is_error", [True, None])
                    results.append(result)
                results += [message_part(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
                if rng.random() < 0.03:
                    rng.shuffle(results)
                if rng.random() > 0.03:
                    items.append({"role": "user", "content": results or "x"})
    body: dict = {"model": rng.choice(MODELS), "messages": items}
    maybe(rng, 0.7, body, "max_tokens", [1, 100, 10**6, 4096] + ([0] if rng.random() < 0.05 else []))
    maybe(
        rng,
        0.4,
        body,
        "system",
        [
            "sys",
            "",
            [],
            [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "b"}],
            [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}],
        ],
    )
    maybe(rng, 0.4, body, "thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}])
    maybe(rng, 0.2, body, "output_config", [{"effort": e} for e in ("low", "max", "none", "xhigh", "minimal")] + [{}])
    maybe(rng, 0.2, body, "temperature", [0, 1, 0.3] + ([3] if rng.random() < 0.1 else []))
    maybe(rng, 0.2, body, "top_p", [0.5, 1] + ([0] if rng.random() < 0.1 else []))
    maybe(rng, 0.2, body, "stop_sequences", [["x"], []] + ([[""], ["x"] * 17] if rng.random() < 0.1 else []))
    maybe(rng, 0.3, body, "stream", [True, False])
    if rng.random() < 0.4:
        body["tools"] = []
        for name in rng.sample(["f", "g", "h", "bad name"] if rng.random() < 0.05 else ["f", "g", "h"], rng.randint(0, 3)):
            tool: dict = {"name": name, "input_schema": rng.choice(PLAIN_SCHEMAS if rng.random() < 0.1 else STRICT_SCHEMAS[:6])}
            maybe(rng, 0.4, tool, "description", ["d", None])
            maybe(rng, 0.3, tool, "defer_loading", [True, False])
            body["tools"].append(tool)
        if rng.random() < 0.05:
            body["tools"].append(
                rng.choice([{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash", "name": "bash"}])
            )
    maybe(
        rng,
        0.3,
        body,
        "tool_choice",
        [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"}, {"type": "tool", "name": "zz"}],
    )
    return body


def response_content(rng: random.Random, images: bool = True) -> str | list:
    if rng.random() < 0.5:
        return rng.choice(TEXTS)
    parts: list = []
    for _ in range(rng.randint(0, 3)):
        draw = rng.random()
        if draw < 0.75 or not images:
            parts.append(
                {"type": rng.choice(["input_text", "output_text"] if images else ["output_text"]), "text": rng.choice(TEXTS)}
            )
        elif draw < 0.92:
            parts.append(
                {
                    "type": "input_image",
                    **rng.choice(
                        [
                            {"image_url": "http://a"},
                            {"image_url": "data:image/png;base64,AAAA", "detail": "low"},
                            *([{"image_url": "x"}, {"file_id": "f"}, {}] if rng.random() < 0.1 else []),
                        ]
                    ),
                }
            )
        else:
            parts.append({"type": "input_file", "file_id": "x"})
    return parts


def found_tools(rng: random.Random) -> list[dict]:
    """What a tool search answers."""
    bad = rng.random() < 0.1
    names = [f"found{n}" for n in range(40)] + (["f", "bad name"] if bad else [])
    tools: list[dict] = []
    for _ in range(rng.randint(0, 2)):
        kind = rng.choice(["function"] * 4 + ["namespace"] * 2 + ["web_search", "custom", "tool_search"] + ["other"] * bad)
        function = {"type": "function", "name": rng.choice(names)}
        maybe(rng, 0.6, function, "description", ["d", "", None])
        maybe(rng, 0.6, function, "parameters", [{"type": "object"}, {}, None] + ([{"type": "x"}, [1]] if bad else []))
        maybe(rng, 0.1, function, "strict", [False, None] + [True] * bad)
        if kind == "function":
            tools.append(function)
        elif kind == "namespace":
            inner = [function, {"type": "function", "name": "g"}][: rng.randint(1, 2)]
            tools.append({"type": "namespace", "name": rng.choice(["ns", "nt"]), "tools": inner})
            maybe(rng, 0.5, tools[-1], "description", ["space", "", None])
        elif kind == "custom":
            tools.append({"type": "custom", "name": "other" if bad else "apply_patch"})
        elif kind == "tool_search":
            tools.append({"type": "tool_search"})
            maybe(rng, 0.5, tools[-1], "execution", ["server", None] + ["client"] * bad)
        else:
            tools.append({"type": kind})
    return tools


def responses_body(rng: random.Random) -> dict:
    items: list = []
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        kind = rng.choice(
            ["user", "user", "system", "developer", "assistant", "assistant", "reasoning", "calls", "calls", "other"]
        )
        if kind in ("user", "system", "developer"):
            items.append({"role": kind, "content": response_content(rng)})
            maybe(rng, 0.3, items[-1], "type", ["message"])
        elif kind == "assistant":
            items.append({"role": kind, "content": response_content(rng, rng.random() < 0.03)})
        elif kind == "reasoning":
            items.append(
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [
                        {"type": "reasoning_text", "text": rng.choice(["r", "", "x\ny"])} for _ in range(rng.randint(0, 2))
                    ],
                }
            )
        elif kind == "other":
            items.append({"type": rng.choice(["item_reference", "mcp_call", "local_shell_call"]), "id": "x"})
        else:
            ids = rng.sample(["a", "b", "c"], rng.randint(1, 3))
            results = []
            for i in ids:
                if rng.random() < 0.2:
                    items.append(
                        {
                            "type": "custom_tool_call",
                            "call_id": i,
                            "name": "apply_patch",
                            "input": rng.choice(['p"q', "", "多\n"]),
                        }
                    )
                    results.append({"type": "custom_tool_call_output", "call_id": i, "output": rng.choice(["z", ""])})
                elif rng.random() < 0.2:
                    items.append(
                        {"type": "tool_search_call", "call_id": i, "arguments": rng.choice([{}, {"q": "x", "a": [1.5]}])}
                    )
                    maybe(rng, 0.3, items[-1], "execution", ["client", "server", None])
                    results.append({"type": "tool_search_output", "call_id": i, "tools": found_tools(rng)})
                    maybe(rng, 0.3, results[-1], "execution", ["client", "server", None])
                else:
                    items.append({"type": "function_call", "call_id": i, "name": "f", "arguments": rng.choice(ARGUMENTS)})
                    maybe(rng, 0.2, items[-1], "namespace", ["ns", None])
                    output = response_content(rng)
                    if isinstance(output, list):
                        output = [p for p in output if p["type"] != "output_text"]
                    results.append({"type": "function_call_output", "call_id": i, "output": output})
            rng.shuffle(results)
            if rng.random() < 0.07:
                results.pop() if rng.random() < 0.5 else results.append(
                    {"type": "function_call_output", "call_id": rng.choice(["a", "zz", ""]), "output": "x"}
                )
            items += results
    if rng.random() < 0.05:
        rng.shuffle(items)
    body: dict = {"model": rng.choice(MODELS), "input": items if rng.random() < 0.9 else rng.choice(["text", "", "json", []])}
    maybe(rng, 0.3, body, "instructions", ["be brief", "", "JSON please", None])
    maybe(rng, 0.3, body, "max_output_tokens", [1, 100] + ([0, 10**6] if rng.random() < 0.1 else []))
    maybe(
        rng,
        0.4,
        body,
        "reasoning",
        [{"effort": e} for e in ("none", "none", "minimal", "high", "max")] + [{}, {"summary": "auto"}],
    )
    maybe(rng, 0.2, body, "temperature", [0, 0.3, 1] + ([3] if rng.random() < 0.1 else []))
    maybe(rng, 0.2, body, "top_p", [0.95, 0.97, 1] + ([0] if rng.random() < 0.1 else []))
    maybe(rng, 0.2, body, "top_logprobs", [0, 5] + ([21] if rng.random() < 0.1 else []))
    maybe(rng, 0.3, body, "stream", [True, False])
    maybe(rng, 0.2, body, "user", ["u"])
    form = rng.random()
    if form < 0.1:
        body["text"] = {"format": {"type": "json_object"}}
    elif form < 0.25:
        is_strict = rng.choice([True, False, None])
        body["text"] = {
            "format": {
                "type": "json_schema",
                "name": "n",
                "schema": rng.choice(STRICT_SCHEMAS if is_strict else PLAIN_SCHEMAS),
                "strict": is_strict,
            },
            "verbosity": "low",
        }
    elif form < 0.3:
        body["text"] = rng.choice([{}, {"format": {"type": "text"}}])
    if rng.random() < 0.45:
        body["tools"] = [response_tool(rng) for _ in range(rng.randint(0, 3))]
    maybe(
        rng,
        0.3,
        body,
        "tool_choice",
        [
            "auto",
            "none",
            "required",
            {"type": "function", "name": rng.choice(["f", "ns::a", "zz"])},
            {"type": "custom", "name": "apply_patch"},
            {"type": "web_search"},
        ],
    )
    maybe(rng, 0.1, body, "metadata", [{"a": "b"}])
    return body


def response_tool(rng: random.Random) -> dict:
    draw = rng.random()
    if draw < 0.5:
        return {"type": "function", **request_tool(rng)["function"]}
    if draw < 0.65:
        return {"type": "custom", "name": "apply_patch" if rng.random() < 0.95 else "other"}
    if draw < 0.85:
        space: dict = {
            "type": "namespace",
            "name": rng.choice(["ns", "n2"]),
            "tools": [{"type": "function", **request_tool(rng)["function"]} for _ in range(rng.randint(0, 2))],
        }
        maybe(rng, 0.5, space, "description", ["D", "", None])
        return space
    return rng.choice(
        [
            {"type": "web_search"},
            {"type": "mcp"},
            {"type": "web_search", "search_context_size": "low", "user_location": {"type": "approximate", "city": "x"}},
        ]
    )


def spoil(rng: random.Random, value) -> None:
    """Replace, remove or add one thing somewhere in a body."""
    places = []

    def walk(item) -> None:
        if isinstance(item, dict | list):
            for key in item if isinstance(item, dict) else range(len(item)):
                if key not in ("parameters", "schema", "arguments", "input_schema"):
                    places.append((item, key))
                    walk(item[key])

    walk(value)
    container, key = rng.choice(places)
    if rng.random() < 0.25 and isinstance(container, dict):
        del container[key]
    else:
        wrong = rng.choice(WRONG)
        if key == "type" and isinstance(wrong, int):
            wrong = "x"  # the referee takes a number for the variant of that index, we do not
        # A sequence in place of a struct or tagged enum is the referee's positional form, which we refuse.
        structs = isinstance(container[key], dict) or key in ("thinking", "stream_options", "response_format", "tool_choice")
        container[key] = {} if isinstance(wrong, list) and structs else wrong


def convert_case(protocol: str, make: Callable[[random.Random], dict]) -> Callable[[random.Random], tuple]:
    def case(rng: random.Random) -> tuple:
        body = make(rng)
        if rng.random() < 0.15:
            spoil(rng, body)
        reject = rng.random() < 0.2
        ours = oracle.convert_ours(protocol, body, reasoning_content="reject" if reject else "fill_empty")
        behaviour = oracle.official.ReasoningContentBehavior
        options = oracle.official.ConversionOptions().with_reasoning_content_behavior(
            behaviour.Reject if reject else behaviour.FillEmpty
        )
        return (protocol, body), ours, oracle.convert_theirs(protocol, body, options)

    return case


def image_case(rng: random.Random) -> tuple:
    """Token counts of any size. The referee counts a size by its own rule again, so the size itself is what to give."""
    side = lambda: int(2 ** rng.uniform(0, 13))  # noqa: E731
    size = (side(), side())
    info = oracle.official.ImageInfo(b"", *size)
    theirs = oracle.official.MultiModalData([info]).image_token_adjustment() + 1
    return size, image_tokens(*size), theirs


def preprocess_case(rng: random.Random) -> tuple:
    """Sizes after resizing, with real images."""
    size = (int(2 ** rng.uniform(0, 10)), int(2 ** rng.uniform(0, 10)))
    detail = rng.choice(["low", "high", "auto", "original"])
    return (size, detail), oracle.preprocess_ours(size, detail), oracle.preprocess_theirs(size, detail)


def encode_case(rng: random.Random) -> tuple:
    """Prompt ids; the second encoding of ours comes from the caches."""
    version = rng.choice(["v4", "v41"])
    spec = conversation(rng)
    ours, theirs = oracle.conversation_pair(spec)
    ids = oracle.encode_theirs(version, theirs)
    return (version, spec), [oracle.encode_ours(version, ours), oracle.encode_ours(version, ours)], [ids, ids]


WILD: list = [None, True, False, 0, -1, 1.5, 1e308, 2**64, -(2**70), "", "x", "json", "\ud800", "<｜image｜>", [], [[]], [1]]
WILD += [
    ["a"],
    {},
    {"a": 1},
    {"type": "x"},
    {"type": []},
    {"role": "user"},
    [{}],
    [None],
    "data:image/png;base64,AA",
    "http://[x",
]
EXTRAS = ["type", "role", "content", "name", "tools", "id", "strict", "min_tokens", "top_k", "stop_token_ids", "guided_json"]
EXTRAS += ["chat_template_kwargs", "structured_outputs", "max_completion_tokens", "user", "n"]
BYTES = b'"{}[]:,0-eE.\\tnul\xff\x00 \xed\xa0'
SCRAPS = [b"null", b"1e999", b"\\ud800", b"[[[[", b'{"":', b"-0", b"99999999999999999999"]


def completions_body(rng: random.Random) -> dict:
    body: dict = {"model": rng.choice(MODELS), "prompt": rng.choice(["a", ["a"], [1, 2], [[1]]])}
    for name, values in (("max_tokens", [3]), ("logprobs", [1]), ("n", [2]), ("suffix", ["x"]), ("stream", [True])):
        maybe(rng, 0.5, body, name, values)
    return body


def wild(rng: random.Random, body: dict) -> None:
    """A few values changed, deleted or added, anywhere."""
    for _ in range(rng.randint(1, 3)):
        places = [container for container in containers(body) if container]
        if not places:
            return
        place, way = rng.choice(places), rng.random()
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if way < 0.6:
            place[key] = copy.deepcopy(rng.choice(WILD))
        elif isinstance(place, list):
            place.append(copy.deepcopy(rng.choice(place)))
        elif way < 0.8:
            del place[key]
        else:
            place[rng.choice(EXTRAS)] = copy.deepcopy(rng.choice(WILD))


def containers(value: object) -> list:
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value] + [found for item in inner for found in containers(item)]


def garble(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, way = rng.randrange(len(out) + 1), rng.random()
        if way < 0.4:
            out[at : at + 1] = bytes([rng.choice(BYTES)])
        elif way < 0.6:
            del out[at : at + rng.randint(1, 20)]
        elif way < 0.8:
            out[at:at] = out[at : at + rng.randint(1, 30)]
        else:
            out[at:at] = rng.choice(SCRAPS)
    return bytes(out)


def bodies_case(rng: random.Random) -> tuple:
    """A spoilt body in any protocol and dialect: accepted and rendered, or refused with a 4xx and a body of JSON."""
    protocol, make = rng.choice(list(BODIES.items()))
    body = make(rng)
    if rng.random() < 0.5:
        wild(rng, body)
        data = json.dumps(body).encode()
    else:
        data = garble(rng, json.dumps(body).encode()) if rng.random() < 0.9 else rng.randbytes(rng.randint(0, 200))
    return (protocol, data), oracle.outcome(protocol, data, rng.choice(["open", "official"])), "clean"


BODIES = {"chat": chat_body, "responses": responses_body, "messages": messages_body, "completions": completions_body}
KINDS: dict[str, Callable[[random.Random], tuple]] = {
    "render": render_case,
    "encode": encode_case,
    "image": image_case,
    "preprocess": preprocess_case,
    "convert_chat": convert_case("chat", chat_body),
    "convert_responses": convert_case("responses", responses_body),
    "convert_messages": convert_case("messages", messages_body),
    "bodies": bodies_case,
    "stream_chat": stream_case("chat"),
    "stream_responses": stream_case("responses"),
    "stream_messages": stream_case("messages"),
}

if __name__ == "__main__":
    sys.exit(main())
