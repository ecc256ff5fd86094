"""Spellings: against a regular expression over the whole text, whatever the window."""

import re
from types import SimpleNamespace

import pytest

from glm53d.text import spellings
from glm53d.text.spellings import WINDOW, Spellings

STRINGS = ["<a>", "<ab>", "<ab>c", "</a>", "[M]", "[gM]", "/no", "x|*"]
TEXTS = ["", "plain", "<a>", "<ab>c<ab><a", "<<a></a>[M[gM]]/no/nox|*x|", "<ab><ab>d" * 5, "<" * 9, "a/n/no é<a>数[gM]"]


@pytest.mark.parametrize("window", [1, 2, 3, 5, 100])
def test_a_text_is_cut_at_what_it_spells_the_longest_first(monkeypatch, window):
    monkeypatch.setattr(spellings, "WINDOW", window)
    whole = re.compile(f"({'|'.join(map(re.escape, sorted(STRINGS, key=len, reverse=True)))})")
    for text in [*TEXTS, "".join(TEXTS)]:
        assert Spellings(STRINGS).split(text) == whole.split(text)
        assert Spellings([]).split(text) == [text]


def test_no_search_goes_over_a_long_text():
    """[R18] Each holds the GIL as long as it takes."""
    found, spans = Spellings(STRINGS), []
    pattern = found._pattern

    def search(text, start, end):
        spans.append(end - start)
        return pattern.search(text, start, end)

    found._pattern = SimpleNamespace(search=search)
    found.split("<" * 5 * WINDOW)
    assert len(spans) == 5 and max(spans) < WINDOW + max(map(len, STRINGS))
