"""What people are shown of text from elsewhere."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfedatm.base.text import printable


@given(st.text(max_size=300), st.integers(1, 250))
def test_it_is_one_line_of_limited_length_that_can_only_be_read(text, limit):
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()


@given(st.text(max_size=300))
def test_twice_is_the_same_as_once(text):
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("two\nlines", r"two\nlines"),
        ("\x1b[2J\x1b[31mred", r"\x1b[2J\x1b[31mred"),
        ("\x9b2J", r"\x9b2J"),
        ("a\rb\x08\x00", r"a\rb\x08\x00"),
        ("evil\u202egnp.exe", r"evil\u202egnp.exe"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\ud800", r"\ud800"),
        ("München <b>&amp;$", "München <b>&amp;$"),
        ("", ""),
    ],
)
def test_what_would_act_on_a_terminal_is_shown_instead(text, shown):
    assert printable(text) == shown


def test_of_ten_megabytes_only_the_beginning_is_looked_at():
    endless = "\x1b" * 10**7
    tracemalloc.start()
    try:
        assert printable(endless).endswith("…")
        assert tracemalloc.get_traced_memory()[1] < 10**5
    finally:
        tracemalloc.stop()


def test_anything_has_a_text():
    class Mute:
        def __str__(self):
            raise RuntimeError("no")

    assert printable(Mute()) == "a value of type Mute"
    assert printable(10**5000) == "a value of type int"
    assert printable(3) == "3"
