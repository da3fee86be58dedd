"""Decoded JSON against types: the first wrong field is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import pytest

from deepseek_attn.utils.typed_json import find_problem
from tests.support.typed import required


class Row(TypedDict):
    number: int
    value: float | None


class Document(TypedDict):
    rows: list[Row]
    by_name: dict[str, Row]
    pair: tuple[int, float]
    flag: bool
    anything: Mapping[str, Any]
    note: NotRequired[str]


class Loose(TypedDict, total=False):
    number: int


ROW = {"number": 1, "value": None}
GOOD = {"rows": [ROW, {"number": 2, "value": 3}], "by_name": {"a": ROW}, "pair": [1, 0.5], "flag": True, "anything": {}}


@pytest.mark.parametrize("value", [GOOD, GOOD | {"note": "x", "more": object()}, GOOD | {"anything": {"a": [1]}}])
def test_what_fits(value):
    assert find_problem(value, Document, "file") is None


def test_keys_of_a_loose_type_may_be_absent():
    assert find_problem({}, Loose, "file") is None
    assert find_problem({"number": "1"}, Loose, "file") == "file.number is '1': expected an integer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {}}, "file.rows is {}: expected a list"),
        ({"rows": [ROW, {"number": 1}]}, "file.rows[1].value is missing"),
        ({"rows": [ROW | {"number": True}]}, "file.rows[0].number is True: expected an integer"),
        ({"rows": [ROW | {"number": 1.0}]}, "file.rows[0].number is 1.0: expected an integer"),
        ({"rows": [ROW | {"value": float("nan")}]}, "file.rows[0].value is nan: expected a number"),
        ({"rows": [ROW | {"value": 10**400}]}, "file.rows[0].value is 1000"),
        ({"by_name": [1]}, "file.by_name is [1]: expected an object"),
        ({"by_name": {"a": 3}}, "file.by_name.a is 3: expected an object"),
        ({"pair": [1]}, "file.pair is [1]: expected a list of 2"),
        ({"pair": [0.5, 1]}, "file.pair[0] is 0.5: expected an integer"),
        ({"flag": 1}, "file.flag is 1: expected true or false"),
        ({"note": None}, "file.note is None: expected text"),
    ],
)
def test_the_first_wrong_field_is_named(changes, message):
    assert required(find_problem(GOOD | changes, Document, "file")).startswith(message)


def test_another_kind_of_document():
    assert find_problem([], Document, "file") == "file is []: expected an object"
