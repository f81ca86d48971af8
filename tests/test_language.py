"""Known slips of language in what a user reads: README, pages, help texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from tesla_med.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNITS = (
    "seconds?|ms|minutes|milliseconds|hours|slices|views|files?|lines?|rows?|MiB|GiB|GB|updates?|passes|bytes"
    "|points?|pictures?"
)
OF = (
    "case|volume|slice|step|file|tile|second|batch|run|site|class|update|image|week|day|session|model|seed"
    "|call|worker|layer"
)
PATTERNS = {
    "'a' for 'per'": rf"\b(?:{UNITS}) an? (?:{OF})\b(?! of\b)",
    "'allow to' needs an object": r"\b(?:allows?|permits?|enables?) to [a-z]",
    "no plural": r"\b(?:informations|softwares|datas|feedbacks|trainings sets)\b",
    "'depends of'": r"\b(?:depends?|depending|independent) of\b(?! the run)",
    "'per default'": r"\bper default\b",
    "'actual' for 'current'": r"\bactual (?:version|state|value|case|directory)\b",
    "a word twice": r"\b(the|a|an|of|to|is|are|and|in|on|for|with|that)\s+\1\b(?!-)",
    "'respectively' at the head": r"(?:^|\. )Respectively",
    "'adaption'": r"\badaptions?\b",
}


def prose(text):
    """Return a page without code, tables' rules and addresses."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", " `code` ", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def helps():
    found = {}

    def walk(command, words):
        texts = [command.help or "", command.epilog or ""]
        texts += [getattr(item, "help", None) or "" for item in command.params]
        found[" ".join(words)] = "\n".join(texts)
        for name, item in getattr(command, "commands", {}).items():
            walk(item, (*words, name))

    walk(typer.main.get_command(app), ("tesla-med",))
    return found


@pytest.mark.parametrize("slip", PATTERNS)
def test_no_page_and_no_help_text_has_a_known_slip(slip):
    texts = {str(page.relative_to(ROOT)): prose(page.read_text(encoding="utf-8")) for page in PAGES}
    found = [
        f"{name}: ...{text[max(0, hit.start() - 40) : hit.end() + 20]!r}"
        for name, text in (texts | helps()).items()
        for hit in re.finditer(PATTERNS[slip], text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("slip", "text"),
    [
        ("'a' for 'per'", "It takes 4 seconds a volume."),
        ("'allow to' needs an object", "This allows to adapt."),
        ("'depends of'", "It depends of the scanner."),
        ("a word twice", "masks of the the run"),
        ("'adaption'", "after adaption"),
    ],
)
def test_a_slip_is_found(slip, text):
    assert re.search(PATTERNS[slip], prose(text))
    assert not re.search(PATTERNS[slip], prose(f"```\n{text}\n```"))


def test_every_command_says_what_it_does_in_a_sentence():
    for name, text in helps().items():
        first = text.strip().splitlines()[0]
        assert first.endswith("."), f"{name}: {first}"
        assert first[0].isupper(), f"{name}: {first}"
