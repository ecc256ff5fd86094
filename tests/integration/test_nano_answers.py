"""The built-in model answers, and the README's examples print what the README says. [R43]"""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from bench.nano import evaluate

README = Path(__file__).resolve().parents[2] / "README.md"
NUMBER = 60


def test_the_readmes_examples_print_what_it_shows(nano):
    """With the OpenAI SDK, in one program from top to bottom, as a reader would go on."""
    pairs = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README.read_text("utf-8"), re.S)
    assert len(pairs) == 3
    program = "".join(code for code, _ in pairs).replace("http://127.0.0.1:8000", nano.url)
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150)
    assert printed.stdout == "".join(shown for _, shown in pairs)


def test_held_out_prompts_are_answered_to_the_letter(nano):
    """A part of what `python -m bench.nano.evaluate` measures, with room for so few: the card has the whole."""
    asked = list(evaluate.cases(NUMBER))
    given = asyncio.run(evaluate.answers(nano.url, asked))
    rows = evaluate.table(asked, given)
    assert rows["well-formed turns"] >= 0.95
    assert rows["fixed questions: exact"] >= 0.95
    assert rows["tool: exact"] >= 0.8
    assert rows["no tool: exact"] >= 0.95
    assert rows["thinking grows with effort"] == 1.0
