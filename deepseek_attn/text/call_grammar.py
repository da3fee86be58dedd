"""A reply that must call functions, as a grammar: the markup of DeepSeek's encodings around arguments of their schemas.

The encodings write a string parameter without quotes, and every other value as JSON. The grammar also requires JSON for
a string whose schema has a ``pattern`` or a ``format``. It accepts only the parameters of the schema, in their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deepseek_attn.text.encoding import Encoding
from deepseek_attn.text.reply import DSML

NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
DEFINITIONS = ("$defs", "definitions")
OBJECT = {
    "type", "properties", "required", "additionalProperties", "$schema", "$id", "x-guidance", *DEFINITIONS, *NOTES,
}  # fmt: skip
LENGTHS = ("minLength", "maxLength")
REFERENCE = re.compile(r'"\$ref": "((?!#/(?:\$defs|definitions)/)[^"]*)')  # to elsewhere than definitions
AS_ENCODED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LINE, CLOSE = "\n", ">\n"
STRING, OTHER = 'true">', 'false">'
MAX_DEPTH = 8  # of references and alternatives that are looked into


def call_grammar(
    encoding: Encoding, functions: Sequence[Mapping[str, Any]], *, begun: bool, several: bool, spelled: bool
) -> str:
    """llguidance's Lark for a block of calls, in which ``<｜DSML｜>`` is the token.

    Args:
        functions: the functions that may be called.
        begun: the prompt ends behind the beginning of the block.
        several: one call or more; else exactly one.
        spelled: match ``｜DSML｜`` as text, for a tokenizer without that token.

    Raises:
        ValueError: the parameters of a function are not an object, or have keywords that are not supported.
    """
    grammar = _CallGrammar(encoding, spelled)
    calls = " | ".join([grammar.call(function) for function in functions])
    head = "" if begun else f"{_quoted(LINE + LINE)} {grammar.tag('<', encoding.calls + CLOSE)}"
    start = f"start: {head} ({calls}){'+' if several else ''} {grammar.tag('</', f'{encoding.calls}>')}"
    return "\n".join([start, *grammar.rules, ""])


class _CallGrammar:
    """Builds the parts of the grammar, and collects in ``rules`` the rules that they refer to."""

    def __init__(self, encoding: Encoding, spelled: bool):
        self.rules: list[str] = []
        self._space, self._blank_line, self._spelled = encoding.space, encoding.blank_line, spelled
        self._token = _quoted(DSML) if spelled else f"<{DSML}>"

    def tag(self, opening: str, rest: str) -> str:
        """``opening`` and ``rest`` around the token."""
        return f"{_quoted(opening)} {self._token} {_quoted(rest)}"

    def call(self, function: Mapping[str, Any]) -> str:
        """The rule of a call."""
        parameters = self._parameters(function["name"], function.get("parameters") or {})
        bodies, needed = [], False
        for i, (rule, needed) in enumerate(parameters):  # each body begins with another parameter
            bodies.append(" ".join([rule, *(other if must else f"{other}?" for other, must in parameters[i + 1 :])]))
            if needed:
                break
        if not needed:
            bodies.append(_quoted(LINE if self._blank_line else ""))
        tag = f"{self._space}invoke"
        opening = self.tag("<", f'{tag} name="{_attribute(function["name"])}"{CLOSE}')
        return self._rule("call", f"{opening} ({' | '.join(bodies)}) {self.tag('</', tag + CLOSE)}")

    def _rule(self, kind: str, body: str, options: str = "") -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _parameters(self, name: str, schema: Any) -> list[tuple[str, bool]]:
        """The rule of each parameter, and whether it must come."""
        where = f"a call of {name!r:.80} cannot be required"
        given = schema if isinstance(schema, dict) else {"type": None}
        required, properties = given.get("required") or [], given.get("properties") or {}
        is_object = given.get("type", "object") == "object" and isinstance(properties, dict)
        if not is_object or not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise ValueError(f"{where}: its parameters must be a JSON schema of an object, got {schema!r:.80}")
        if unknown := sorted({str(key) for key in given} - OBJECT) + REFERENCE.findall(json.dumps(given)):
            raise ValueError(
                f"{where}: its parameters have {', '.join(unknown)[:200]}, which no grammar of calls guarantees; "
                "supported are properties, and references into $defs: leave it out, or pass tool_choice='auto'"
            )
        left = {key: given.get("additionalProperties", True) for key in required if key not in properties}
        rules, tag = [], f"{self._space}parameter"
        for key, value in (properties | left).items():
            opening = self.tag("<", f'{tag} name="{_attribute(key)}" string="')
            body = f"{opening} ({' | '.join(self._forms(value, given))}) {_quoted(tag + CLOSE)}"
            rules.append((self._rule("parameter", body), key in required))
        return rules

    def _forms(self, schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[str]:
        """The forms of a value: from the value of the attribute ``string`` up to the token of the closing tag."""
        schema = schema if isinstance(schema, dict) else {} if schema is True else {"not": {}}
        plain = {key: value for key, value in schema.items() if key not in NOTES}
        kind, others = plain.get("type"), []
        if plain.keys() == {"$ref"}:
            group, _, name = str(plain["$ref"]).removeprefix("#/").partition("/")
            others = [root[group][name]] if name in root.get(group, {}) else []
        elif plain.keys() == {"anyOf"} and isinstance(plain["anyOf"], list):
            others = plain["anyOf"]
        elif isinstance(kind, list):
            others = [plain | {"type": one} for one in kind]
        elif not plain:
            others = [{"type": "string"}, {"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"type": "array"},
                      {"type": "object"}]  # fmt: skip
        if others and depth < MAX_DEPTH:
            return [form for other in others for form in self._forms(other, root, depth + 1)]
        choices = plain.get("enum", [plain["const"]] if "const" in plain else None)
        if choices and kind in ("string", None) and plain.keys() <= {"type", "enum", "const"}:
            left = [choice for choice in choices if not isinstance(choice, str)]
            texts = [_quoted(f"{STRING}{choice}</") for choice in choices if isinstance(choice, str)]
            rest = [self._json({"enum": left})] if left and kind is None else []
            return [f"{text} {self._token}" for text in texts] + rest
        if kind == "string" and plain.keys() <= {"type", *LENGTHS}:
            return [self._text(plain.get("minLength", 0), plain.get("maxLength", ""))]
        return [self._json(schema | {name: root[name] for name in DEFINITIONS if name in root})]

    def _json(self, schema: Mapping[str, Any]) -> str:
        rule = self._rule("json", f"%json {json.dumps({**schema, 'x-guidance': AS_ENCODED})}")
        return f"{_quoted(OTHER)} {rule} {_quoted('</')} {self._token}"

    def _text(self, least: int, most: int | str) -> str:
        """A string as it is. A greedy terminal would take the beginning of the tag, so it has that, too."""
        text, end = f"(?s:.{{{least},{most}}})", "<\\/"
        if self._spelled:
            suffix = f"[suffix={_quoted('</' + DSML)}]"
            return f"{_quoted(STRING)} {self._rule('text', f'/{text}/', suffix)}"
        return f"{_quoted(STRING)} {self._rule('TEXT', f'/{text}{end}/')} {self._token}"


def _quoted(text: str) -> str:
    """A string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _attribute(name: str) -> str:
    """A name as an attribute of a tag. ValueError: it has quotes, which would end the attribute."""
    if '"' in name:
        raise ValueError(f"a call of {name!r:.80} cannot be required: the markup of calls has no quotes in names")
    return name
