"""JSON that others wrote: what is not decoded, and the message."""

import pytest

from deepseek_attn.utils.json_files import MAX_DEPTH, JSONSyntaxError, parse_json, read_json

BROKEN = {
    "lists": ("[" * 100_000 + "]" * 100_000, "more than 64 objects or lists inside one another"),
    "objects": ('{"a":' * 100_000 + "1" + "}" * 100_000, "more than 64 objects or lists"),
    "open lists": ("[" * 100_000, "more than 64 objects or lists"),
    "one level too deep": ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "more than 64 objects or lists"),
    "deep value": ('{"a": 1, "b": [{"c": ' + "[" * 500 + "]" * 500 + "}]}", "more than 64 objects or lists"),
    "digits": ('{"a": ' + "9" * 10_000 + "}", "an integer of thousands of digits"),
    "twice": ('{"a": 1, "b": {"c": 1, "c": 1}}', "'c' is repeated in one object"),
    "broken": ('{"a": 1,\n "b": }', "not valid JSON at line 2, column 7: Expecting value"),
    "empty": ("", "not valid JSON at line 1, column 1"),
    "latin-1": (b'{"a": "\xff"}', "not UTF-8 text at byte 7"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_refused(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_json(text, "config of x")
    assert type(error.value) is (JSONSyntaxError if "not valid JSON" in message else ValueError)
    assert str(error.value).startswith("config of x: ")
    assert len(str(error.value)) < 200


def test_decoded():
    text = '{"a": [1, 2.5, "\\u00e9", null, {}], "b": [[]]}'
    assert parse_json(text, "x") == parse_json(text.encode(), "x") == {"a": [1, 2.5, "é", None, {}], "b": [[]]}
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deepest.encode(), "x")


def test_size_of_files(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("[1, 2, 3]")
    assert read_json(file, "x", 9) == read_json(file, "x", None) == [1, 2, 3]
    with pytest.raises(ValueError, match="x: 9 bytes, at most 8 are read"):
        read_json(file, "x", 8)
