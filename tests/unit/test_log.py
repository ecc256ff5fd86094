"""The log's lines."""

import logging
import re
import subprocess
import sys

import pytest

from glm53d.obs.log import LineFormatter


def line(message: str, **extra: object) -> str:
    record = logging.makeLogRecord({"levelname": "INFO", "msg": message, "created": 0.25, "msecs": 250.0, **extra})
    return LineFormatter("rank 3").format(record)


def test_a_line_has_time_level_process_and_message():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.250 INFO    rank 3  loaded", line("loaded"))


def test_a_line_about_a_request_ends_with_its_ids():
    assert line("done", rid="abc", handle=7).endswith("done rid=abc handle=7")


@pytest.mark.parametrize("separator", ["\n", "\r", "\x1b[2J", "\x85", "\u2028", "\x00"])
def test_text_from_a_client_starts_no_line_and_steers_no_terminal(separator: str):
    text = line("done", rid=f"a{separator}b")
    assert len(text.splitlines()) == 1 and text.isprintable()


def test_an_exception_is_one_line_that_says_where():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        text = line("failed", exc_info=sys.exc_info())
    assert "failed | ValueError: two\\nlines < " in text and __file__ in text
    assert len(text.splitlines()) == 1


def test_setup_writes_to_standard_error_from_the_level_on():
    code = (
        "import logging; from glm53d.obs.log import setup; setup('warning', 'main'); log = logging.getLogger('a');"
        "log.info('quiet'); log.warning('loud')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.endswith("WARNING main    loud\n")
