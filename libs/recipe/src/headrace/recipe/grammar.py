"""What a request demands of its output, as a grammar that an engine can enforce.

    grammar = constraint(parsed, tokenizer.added_token_id)      None: the output is free

Knows which parts of a request bind the output, where in an output they begin, and how V4 and V4.1 write calls. Grammars are
JSON schemas and regular expressions as the client wrote them, or llguidance's Lark where calls are concerned. Does not know how
they are compiled: what is wrong with a schema is told by whoever compiles it.

In a block of calls everything is bound: tags, names of tools and parameters, and every value by its schema. Parameters come in
the order of the schema's properties. A string stands there as it is (`string="true"`), bound by `enum`, `const`, `minLength`
and `maxLength`; one with other rules (pattern, format) is bound to be written as JSON (`string="false"`).
"""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from .conversation import ToolDefinition
from .errors import RecipeError
from .jsontext import compact
from .protocol.request import ParsedRequest
from .protocol.schema import closed

MAX_BYTES = 256 << 10
TokenId = Callable[[str], int | None]
# Between the tokens of a JSON value inside a call: a few blanks, or one line break and an indent.
SPACE = r"[\x20\x09]{1,8}|[\x20\x09]{0,8}\x0D?\x0A[\x20\x09]{0,64}"
_GAPS = {"v4": ("", "tool_calls"), "v41": (" ", " calls")}  # between the DSML token and a tag; the block's tag
_PLAIN = {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples", "$comment"}
_NOT_AT_ROOT = (
    "allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "propertyNames", "dependentRequired", "minProperties",
    "maxProperties",
)  # fmt: skip
_OTHERS = ["object", "array", "number", "boolean", "null"]  # types that are not strings
_NAME = r'/[^" \\<>\x00-\x1f]{1,64}/'  # of a parameter that no schema names, in Lark
_GOOD_NAME = re.compile(r'[^" \\<>\x00-\x1f]+')


class Grammar(msgspec.Struct, frozen=True):
    """`after`: id of the token of the output that it begins after, -1: with the first. `optional`: the output may end without
    that token."""

    kind: str  # json_schema | regex | lark
    text: str
    after: int = -1
    optional: bool = False


def constraint(parsed: ParsedRequest, token_id: TokenId) -> Grammar | None:
    """The grammar of a request's output. Raises RecipeError: the model's tokens or call format can't express it; too long."""
    grammar = _constraint(parsed, token_id)
    if grammar is not None and (size := len(grammar.text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        raise RecipeError(f"what binds the output (schemas, patterns) has {size:,} bytes; at most {MAX_BYTES:,} are accepted")
    return grammar


def _constraint(parsed: ParsedRequest, token_id: TokenId) -> Grammar | None:
    wanted = parsed.output_constraint
    if wanted is None:
        return None
    reasons = (parsed.parsing.thinking_initial_stage or "").startswith("reasoning")
    after = _id(parsed.parsing.special_tokens.thinking_end, token_id) if reasons else -1
    if wanted.kind == "json":
        return Grammar("json_schema", _schema_text(wanted.original, wanted.strict), after)
    if wanted.kind in ("regex", "lark"):
        return Grammar(wanted.kind, wanted.schema, after)
    calls = _Calls(parsed, token_id)
    conversation = parsed.conversation
    if wanted.kind == "tool_call_required":
        return Grammar("lark", calls.grammar("opened", bound=True))
    if calls.single or any(tool.strict for tool in conversation.tools):
        return Grammar("lark", calls.grammar("begun"), calls.dsml, optional=True)
    if conversation.response_format == "text":
        return None
    return Grammar("lark", calls.grammar("or else", _alternative(parsed)), after)


def _schema_text(original: Any, strict: bool) -> str:
    if original is None:
        return '{"type":"object"}'
    return compact(closed(original) if strict else original)


def _alternative(parsed: ParsedRequest) -> str:
    """The rule of a response format in Lark."""
    conversation = parsed.conversation
    if conversation.response_format == "regex":
        return _regex(conversation.response_regex or "")
    schema = {"type": "object"} if conversation.response_format == "json_object" else conversation.response_schema
    return _json_rule(schema)


def _id(token: str, token_id: TokenId) -> int:
    found = token_id(token)
    if found is None:
        raise RecipeError(f"this model's tokenizer has no {token}, so what follows it can't be constrained")
    return found


def _quoted(text: str) -> str:
    """A literal in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """A regular expression in Lark."""
    out, escaped = [], False
    for char in pattern:
        out.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return f"/{''.join(out)}/"


def _json_rule(schema: Any) -> str:
    schema = {} if schema is True else schema
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": SPACE}, **schema}
    return "%json " + compact(schema)


# --- calls -----------------------------------------------------------------------------------------------------------


class _Calls:
    """The block of calls that a conversation's tools allow, in Lark."""

    def __init__(self, parsed: ParsedRequest, token_id: TokenId):
        self.tools, self.single = parsed.conversation.tools, not parsed.parallel_tool_calls
        self.gap, self.tag = _GAPS[parsed.version]
        self.empty = "\n" if parsed.version == "v41" else ""  # between the tags of a call without parameters
        self.dsml = _id(parsed.parsing.special_tokens.dsml, token_id)
        self.token = f"<[{self.dsml}]>"
        self.rules: list[str] = []

    def grammar(self, start: str, alternative: str = "", bound: bool = False) -> str:
        """`start`: "opened" after the block's opening tag, "begun" after the DSML token in it, "or else" before anything; there
        `alternative` may come instead. `bound`: by the schemas of tools that are not strict, too."""
        block = f'call{"" if self.single else "+"} "</" {self.token} {_quoted(self.tag + ">")}'
        head = _quoted(self.tag + ">\n")
        if start == "opened":
            self.rules.append(f"start: {block}")
        elif start == "begun":
            self.rules.append(f"start: {head} {block}")
        else:
            self.rules.append(f'start: answer | /\\n{{0,2}}</ {self.token} {head} {block}\nanswer: {alternative}')
        self.rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(self.tools))))
        for i, tool in enumerate(self.tools):
            parameters = self._parameters(i, tool, bound)
            opening = _quoted(f'{self.gap}invoke name="{tool.name}">\n')
            closing = _quoted(f"{self.gap}invoke>\n")
            self.rules.append(f'call_{i}: "<" {self.token} {opening} {parameters} "</" {self.token} {closing}')
        self.rules.append("text: /(?s:.*)<\\//")
        self.rules.append(f"other: {_json_rule({'type': _OTHERS})}")
        opening, closing = _quoted(f'{self.gap}parameter name="'), _quoted(f"{self.gap}parameter>\n")
        value = '("true\\">" text | "false\\">" other "</")'
        self.rules.append(f'free: "<" {self.token} {opening} {_NAME} "\\" string=\\"" {value} {self.token} {closing}')
        return "\n".join(self.rules)

    def _parameters(self, number: int, tool: ToolDefinition, bound: bool) -> str:
        """What stands between the tags of a call."""
        schema = tool.parameters if tool.enforced is None else tool.enforced
        schema = schema if isinstance(schema, dict) else {}
        odd = [key for key in _NOT_AT_ROOT if key in schema]
        if tool.strict and odd:
            raise RecipeError(f"strict tool '{tool.name}': `{odd[0]}` at the top level of its parameters can't be enforced")
        if odd or not (tool.strict or bound):
            return f"(free+ | {_quoted(self.empty)})" if self.empty else "free*"
        properties = dict(schema.get("properties") or {})
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        properties |= {name: True for name in required if name not in properties}
        more = schema.get("additionalProperties", not properties)
        parts = []
        for place, (name, value) in enumerate(properties.items()):
            if value is False:  # JSON Schema's "never"
                if name in required:
                    raise RecipeError(f"tool '{tool.name}': its parameter {_quoted(name)} is required and can't be (`false`)")
                continue
            if not _GOOD_NAME.fullmatch(name):
                raise RecipeError(f"tool '{tool.name}': this model's call format can't hold the parameter name {_quoted(name)}")
            rule = f"call_{number}_{place}"
            self.rules.append(f"{rule}: {self._parameter(name, value, schema)}")
            parts.append(rule if name in required else f"{rule}?")
        if more is not False:
            parts.append("free*")
        body = " ".join(parts)
        if required or not self.empty:
            return body
        return f"({body} | {_quoted(self.empty)})" if body else _quoted(self.empty)

    def _parameter(self, name: str, schema: Any, root: dict[str, Any]) -> str:
        text, rest = _split(schema, root, self._words)
        ways = [f'"true\\">" {text}'] if text else []
        if rest is not None:
            ways.append(self._json_way(rest))
        opening, closing = _quoted(f'{self.gap}parameter name="{name}" string="'), _quoted(f"{self.gap}parameter>\n")
        return f'"<" {self.token} {opening} ({" | ".join(ways)}) {self.token} {closing}'

    def _words(self, strings: list[str]) -> str:
        """A terminal of fixed strings, with the `</` behind them: the parser follows any number of them as one."""
        name = f"WORDS_{len(self.rules)}"
        self.rules.append(f'{name}: ({" | ".join(map(_quoted, strings))}) "</"')
        return name

    def _json_way(self, schema: Any) -> str:
        rule = f"value_{len(self.rules)}"
        self.rules.append(f"{rule}: {_json_rule(schema)}")
        return f'"false\\">" {rule} "</"'


def _split(schema: Any, root: dict[str, Any], words: Callable[[list[str]], str]) -> tuple[str, Any]:
    """(Lark of the strings that a parameter may be, with the `</` behind them; the schema of what else it may be, or None).
    Strings whose rules only a JSON schema can say are left to the schema. `words`: names the Lark of fixed strings."""
    whole = _within(schema, root)
    for _ in range(8):
        if not (isinstance(schema, dict) and set(schema) <= {"$ref", "title", "description", "default"} and "$ref" in schema):
            break
        schema = _target(schema["$ref"], root)
    if schema is True or schema == {}:
        return "text", {"type": _OTHERS}
    if not isinstance(schema, dict):
        return "", whole
    if set(schema) <= {"anyOf", "title", "description", "default"} and isinstance(schema.get("anyOf"), list):
        return _union([_split(item, root, words) for item in schema["anyOf"]])
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and set(schema) <= _PLAIN - {"minLength", "maxLength"}:
        if types:
            values = [v for v in values if _is(v, types)]
        strings, others = [v for v in values if isinstance(v, str)], [v for v in values if not isinstance(v, str)]
        return words(strings) if strings else "", {"enum": others} if others else None
    if isinstance(types, list) and "string" in types and (set(schema) <= _PLAIN or len(types) > 1):
        if not _string_rules(schema) <= {"minLength", "maxLength"}:
            return "", whole
        others = [t for t in types if t != "string"]
        return _sized(schema), _within({**schema, "type": others}, root) if others else None
    return "", whole


def _union(parts: list[tuple[str, Any]]) -> tuple[str, Any]:
    texts = [text for text, _ in parts if text]
    rests = [rest for _, rest in parts if rest is not None]
    rest = None if not rests else rests[0] if len(rests) == 1 else {"anyOf": rests}
    return f"({' | '.join(texts)})" if texts else "", rest


def _string_rules(schema: dict[str, Any]) -> set[str]:
    return set(schema) & {"minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType", "enum", "const"}


def _sized(schema: dict[str, Any]) -> str:
    """Text of some length, with the `</` behind it."""
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not low and high is None:
        return "text"
    return f"/(?s:.{{{int(low)},{'' if high is None else int(high)}}})<\\//"


def _is(value: Any, types: list[str]) -> bool:
    names = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",)}
    return not {"object" if isinstance(value, dict) else "null", *names.get(type(value), ())}.isdisjoint(types)


def _target(ref: Any, root: dict[str, Any]) -> Any:
    """What a local reference points at; None: nothing."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    node: Any = root
    for step in ref[1:].split("/")[1:]:
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _within(schema: Any, root: dict[str, Any]) -> Any:
    """`schema` by itself: what it refers to comes along."""
    if not isinstance(schema, dict) or '"$ref"' not in compact(schema):
        return schema
    return {"$defs": {"root": _moved(root)}, **_moved({k: v for k, v in schema.items() if k not in ("$defs", "definitions")})}


def _moved(node: Any) -> Any:
    """A schema whose references to its root point one level deeper."""
    if isinstance(node, list):
        return [_moved(item) for item in node]
    if not isinstance(node, dict):
        return node
    refers = isinstance(node.get("$ref"), str) and node["$ref"].startswith("#")
    return {k: "#/$defs/root" + v[1:] if refers and k == "$ref" else _moved(v) for k, v in node.items()}
