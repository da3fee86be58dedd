"""Stopping: EOS, stop tokens, stop strings over token boundaries, and max_tokens."""

import itertools

import pytest

from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.stopping import StopChecker
from tests.support.typed import untyped

EOS = 1


class Pieces:
    """A decoder whose token ids index a list of texts; ``tail`` is what a flush releases."""

    def __init__(self, texts, tail=""):
        self.texts, self.tail = texts, tail

    def push(self, token_id):
        return self.texts[token_id]

    def flush(self):
        tail, self.tail = self.tail, ""
        return tail


def run(texts, tail="", eos=(), **params):
    """Push all texts until the end; returns the emitted pieces and the reason."""
    checker = StopChecker(SamplingParams(**{"max_tokens": 1000, **params}), eos, untyped(Pieces(texts, tail)))
    pieces = []
    for token_id in range(len(texts)):
        text, reason = checker.push(token_id)
        pieces.append(text)
        if reason:
            break
    return pieces, checker.reason


def splits(text):
    """All ways to cut ``text`` into tokens."""
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces, start = [], 0
        for i, cut in enumerate(cuts, 1):
            if cut:
                pieces.append(text[start:i])
                start = i
        yield [*pieces, text[start:]]


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [
        ("xxENDyy", ("END",), "xx"),
        ("aaabxx", ("aab",), "a"),
        ("ENENDz", ("END",), "EN"),
        ("xabcd", ("abcd", "bc"), "xa"),  # "bc" is complete first, however tokens are cut
        ("xabcd", ("bc", "abc"), "x"),  # complete together: the longer one
        ("ENDxx", ("END",), ""),
        ("xxxEND", ("END",), "xxx"),
    ],
)
def test_stop_string_for_every_tokenization(text, stop, before):
    for tokens in splits(text):
        pieces, reason = run(tokens, stop=stop)
        assert ("".join(pieces), reason) == (before, "stop"), tokens


def test_text_that_cannot_be_a_stop_string_goes_out_at_once():
    pieces, reason = run(["hello ", "E", "N", "x", "E", "ND"], stop="END")
    assert pieces == ["hello ", "", "", "ENx", "", ""]
    assert reason == "stop"


def test_max_tokens_releases_what_was_held_back():
    pieces, reason = run(["a", "EN", "D"], stop="END", max_tokens=2, tail="\ufffd")
    assert (pieces, reason) == (["a", "EN\ufffd"], "length")


def test_stop_string_on_the_last_token_is_a_stop():
    assert run(["a", "END"], stop="END", max_tokens=2) == (["a", ""], "stop")


def test_stop_string_completed_by_the_flush():
    assert run(["a", "EN"], stop="END", max_tokens=2, tail="D!") == (["a", ""], "stop")


def test_eos_is_not_emitted_and_releases_what_was_held_back():
    assert run(["aE", "<eos>", "x"], eos=(EOS,), stop="END") == (["a", "E"], "stop")


def test_ignore_eos_keeps_stop_tokens():
    assert run(["a", "<eos>", "b", "c"], eos=(EOS,), ignore_eos=True, stop_token_ids=(2,)) == (
        ["a", "<eos>", ""],
        "stop",
    )


def test_several_eos_ids():
    assert run(["a", "b", "c"], eos=(2, 7)) == (["a", "b", ""], "stop")


def test_without_a_decoder():
    checker = StopChecker(SamplingParams(max_tokens=3), (EOS,), None)
    assert [checker.push(5) for _ in range(3)] == [("", None), ("", None), ("", "length")]
    with pytest.raises(ValueError, match="need a tokenizer"):
        StopChecker(SamplingParams(stop="x"), (EOS,), None)


def test_nothing_after_the_end():
    checker = StopChecker(SamplingParams(max_tokens=1), (), None)
    checker.push(0)
    with pytest.raises(RuntimeError, match="has ended"):
        checker.push(0)
    assert checker.abort() == ""


def test_abort_releases_what_was_held_back():
    checker = StopChecker(SamplingParams(stop="END"), (), untyped(Pieces(["xE"], tail="?")))
    assert checker.push(0).text == "x"
    assert checker.abort() == "E?"
    assert checker.reason == "abort"


def test_a_stop_string_is_part_of_the_text_on_request():
    """However tokens are cut; what comes after it in the same token is not."""
    for pieces in splits("xaENDyz"):
        found, reason = run(pieces, stop=("END",), include_stop_str_in_output=True)
        assert ("".join(found), reason) == ("xaEND", "stop")
    found, reason = run(["ab", "cd", "ef"], stop_token_ids=[1], include_stop_str_in_output=True)
    assert (found, reason) == (["ab", "cd"], "stop")


def test_stop_strings_do_not_count_before_min_tokens():
    """One that is complete by then is text; one that ends later stops, also where it began before."""
    for pieces in splits("aENDbEND"):
        for least in range(len(pieces) + 1):
            found, reason = run(pieces, stop=("END",), min_tokens=least)
            done = "".join(pieces[:least])
            place = next((i for i in range(1, 9) if "aENDbEND"[:i].endswith("END") and i > len(done)), None)
            assert reason == (None if place is None else "stop")
            assert "".join(found) == "aENDbEND"[: place - 3 if place else 8]


def test_a_stop_string_within_another_that_is_held_back():
    assert run(["xa", "b", "c", "d"], stop=("b", "abz"), min_tokens=2) == (["x", "", "abc", "d"], None)
