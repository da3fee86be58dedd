"""A grammar of required calls accepts the encoded calls whose arguments fit the schemas, and no other text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.engine.structured import GrammarTable
from deepseek_attn.text.call_grammar import call_grammar
from deepseek_attn.text.chat import ENCODINGS, encode_messages
from deepseek_attn.text.encoding import Encoding
from deepseek_attn.text.reply import DSML
from deepseek_attn.text.tokenizer import EOS, Tokenizer
from tests.support.typed import required

pytest.importorskip("llguidance", reason="pip install 'deepseek-attn[structured]'")

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "any"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", 0]},
        "short": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None},
        "flags": {"$ref": "#/$defs/Flags"},
        "kind": {"$ref": "#/$defs/Kind"},
        "code": {"type": "string", "pattern": "^a+b$"},
        "any": {},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Kind"}},
        "both": {"type": ["string", "number"]},
    },
    "required": ["days", "extra"],
    "$defs": {"Flags": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
                        "additionalProperties": False}, "Kind": {"type": "string", "enum": ["x", "y"]}},
}  # fmt: skip
WEATHER = {"name": "weather", "parameters": PARAMETERS}
OPTIONAL = {"name": "search::list", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}}}
NOOP = {"name": "noop"}
FULL = {
    "city": 'Pa"</r\n<is', "days": 3, "unit": "F", "short": "abc", "flags": {"on": True}, "kind": "y",
    "any": "text", "list": ["x", "y"], "both": "1", "extra": [1, {"a": None}],
}  # fmt: skip
BARE = {"days": 9, "extra": "e"}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(SMALL_CHECKPOINT)


@pytest.fixture(scope="module")
def table(tokenizer):
    return GrammarTable(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


def in_order(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: arguments[key] for key in [*PARAMETERS["properties"], "extra"] if key in arguments}


def block(version: Any, *calls: tuple[str, dict[str, Any]]) -> str:
    """The calls as the encoding of a conversation writes them, up to EOS."""
    asked = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    question = {"role": "user", "content": "hi"}
    text = encode_messages([question, {"role": "assistant", "content": "", "tool_calls": asked}], False, version)
    return text[text.index("</think>") + len("</think>") : -len(EOS)]


def takes(table, grammar: str, tokenizer: Tokenizer, text: str, spelled: bool = False) -> bool:
    """Whether the text and EOS are of the grammar."""
    ids: list[int] = []
    mark, eos = required(tokenizer.token_id(DSML)), required(tokenizer.eos_token_id)
    for i, piece in enumerate([text] if spelled else text.split(DSML)):
        ids += [mark] if i else []
        ids += tokenizer.encode_plain(piece)
    ids.append(eos)
    return table.compiled("grammar", grammar).deep_copy().validate_tokens(ids) == len(ids)


@pytest.fixture(params=["V3.2", "V4", "V4.1"])
def version(request):
    return request.param


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_calls_as_they_are_encoded(table, tokenizer, version, begun, spelled):
    style: Encoding = ENCODINGS[version]
    head = f"\n\n<{DSML}{style.calls}>\n" if begun else ""
    options = {"begun": begun, "spelled": spelled}
    functions = [WEATHER, OPTIONAL, NOOP]
    one = call_grammar(style, [WEATHER], several=False, **options)
    any_of = call_grammar(style, functions, several=True, **options)
    names = (
        call_grammar(style, [OPTIONAL], several=False, **options),
        call_grammar(style, [NOOP], several=False, **options),
    )

    def taken(grammar: str, *calls: tuple[str, dict[str, Any]]) -> bool:
        text = block(version, *calls)
        assert text.startswith(head)
        return takes(table, grammar, tokenizer, text[len(head) :], spelled)

    for arguments in (FULL, BARE, {**BARE, "short": None, "extra": {}}):
        assert taken(one, ("weather", in_order(arguments)))
    assert taken(names[1], ("noop", {}))
    for arguments in ({}, {"a": ""}, {"b": False}, {"a": "x", "b": True}):
        assert taken(names[0], ("search::list", arguments))
    calls = [("noop", {}), ("weather", BARE), ("search::list", {"b": True})]
    assert taken(any_of, *calls)
    assert not taken(one, *calls)
    assert not taken(one, ("weather", BARE), ("weather", BARE))
    assert not taken(names[1], ("weather", BARE))
    assert not taken(names[1], ("noop", {"a": "x"}))


@pytest.mark.parametrize(
    "change",
    [
        {"days": 10}, {"days": "3"}, {"days": None}, {"unit": "K"}, {"unit": 1}, {"short": "abcd"}, {"short": 5},
        {"flags": {}}, {"flags": {"on": 1}}, {"kind": "z"}, {"code": "ab"}, {"list": ["z"]}, {"both": True},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_other_schemas_are_not_taken(table, tokenizer, change):
    grammar = call_grammar(ENCODINGS["V4"], [WEATHER], begun=False, several=False, spelled=False)
    assert takes(table, grammar, tokenizer, block("V4", ("weather", BARE)))
    assert not takes(table, grammar, tokenizer, block("V4", ("weather", in_order(BARE | change))))


def test_what_must_come_and_strings_of_a_pattern(table, tokenizer):
    """Such a string is JSON, not text as it is."""
    grammar = call_grammar(ENCODINGS["V4"], [WEATHER], begun=False, several=False, spelled=False)
    for absent in BARE:
        left = {key: value for key, value in BARE.items() if key != absent}
        assert not takes(table, grammar, tokenizer, block("V4", ("weather", left)))
    text = block("V4", ("weather", in_order(BARE | {"code": "aab"})))
    assert not takes(table, grammar, tokenizer, text)
    written = text.replace('"code" string="true">aab<', '"code" string="false">"aab"<')
    assert written != text
    assert takes(table, grammar, tokenizer, written)
    assert not takes(table, grammar, tokenizer, written.replace("aab", "aa"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "its parameters must be a JSON schema of an object, got {'type': 'array'}"),
        ([], None),
        ({"properties": 5}, "must be a JSON schema of an object"),
        ({"required": [5]}, "must be a JSON schema of an object"),
        ({"oneOf": [], "minProperties": 1}, "its parameters have minProperties, oneOf, which no grammar of calls"),
        ({"properties": {"a": {"items": {"$ref": "#"}}}}, "its parameters have #, which no grammar of calls"),
        ({"properties": {'a"b': {}}}, "has no quotes in names"),
    ],
    ids=str,
)
def test_schemas_that_are_refused(parameters, message):
    function = {"name": "f", "parameters": parameters}
    if message is None:
        assert "invoke" in call_grammar(ENCODINGS["V4"], [function], begun=True, several=True, spelled=False)
        return
    with pytest.raises(ValueError, match=r"a call of '(f|a\"b)' cannot be required") as error:
        call_grammar(ENCODINGS["V4"], [function], begun=True, several=True, spelled=False)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "schema", [{"not": {}}, {"uniqueItems": True}, False, {"type": "x"}, {"enum": []}], ids=json.dumps
)
def test_values_that_llguidance_refuses(table, schema):
    parameters = {"properties": {"a": schema}, "required": ["a"]}
    grammar = call_grammar(
        ENCODINGS["V4"], [{"name": "f", "parameters": parameters}], begun=True, several=True, spelled=False
    )
    with pytest.raises(ValueError, match="grammar 'start: "):
        table.compiled("grammar", grammar)
