"""Checks that docstrings, comments, base.yml and the docs are written in plain English.

Each pattern matches a way of writing that is hard to read. A match is a sign, not a proof, so a small share is allowed.
Rewrite the sentence rather than dodge the pattern.
"""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_SHARE = 0.03

# name: (pattern, a text that matches, the same in plain English)
PATTERNS = {
    "a clause or pronoun instead of a noun": (
        r"\b(?:what|that) (?:is|are|was|were|has|have) "
        r"(?:asked|counted|cut|given|kept|left|looked|meant|read|said|saved|taken|there|told)\b"
        r"|\b(?:those|that) of\b(?! (?:the|an?) (?:same|other))"
        r"|\bwhat of\b|\bwhat (?:an?|the) \w+ (?:has|have|is|takes)\b",
        "Returns what is kept.",
        "Returns the saved arrays.",
    ),
    '"where" for "if"': (
        r"\b[Ww]here (?:there (?:is|are)|it|they|one|none|an?|the|that|no|nothing|not)\b",
        "Empty where there is none.",
        "Empty if the run lacks it.",
    ),
    "an inverted sentence": (
        r"(?:^|[.;:] )(?:Of|From|By|To) (?:an?|the|what|one|each|all|several|its|these|those|less|more|them|it)\b"
        r"[^.;:]{0,80},",
        "Of each row, the first token.",
        "The first token of each row.",
    ),
    '"goes on", "stands", "lies"': (
        r"\b(?:go(?:es)? on|went on|stands?(?! for)|lies?) (?:at|in|on|from|where|there|by|beside|with|as)\b"
        r"|\blay it\b",
        "The run goes on from it.",
        "The run resumes from it.",
    ),
    "a possessive instead of a noun": (
        r"\b(?!it's)\w+'s (?:for|is|are|has|have|of|at|in|alone)\b|\b(?:ours|theirs|its own) (?:is|are|at)\b",
        "As XLA's for GPUs is.",
        "Like XLA's GPU compiler.",
    ),
    '"alone", "anew", "apart" after a noun': (
        r"\b\w+ (?:alone|anew|apart)(?=[.,;:)]|$)",
        "It is written by process 0 alone.",
        "Only process 0 writes it.",
    ),
    '"is no", "has none"': (
        r"\b(?:is|are|was|were) no (?!(?:longer|more|less|such|one)\b)\w+|\bhas none\b|\bnone (?:is|are|has)\b",
        "A broken pipe is no failure.",
        "A broken pipe is not a failure.",
    ),
    '"so many"': (
        r"\bso (?:many|much) (?!that)\w+|\bas (?:many|much) as (?:there|it|they)\b",
        "Stops after so many steps.",
        "Stops after this many steps.",
    ),
    '"is said", "is told"': (
        r"\b(?:is|are|was|were) (?:said|told|answered|spelled out|called so)\b",
        "The change is said.",
        "The change is reported.",
    ),
    "a private or archaic word": (
        r"\b(?:drawn|draws|anew|beside (?:that|it|them|which)|therein|thereof)\b"
        r"|\b(?:whatever of|of one's own|in the place of)\b",
        "Tokens are drawn from the logits.",
        "Tokens are sampled from the logits.",
    ),
}
COMPILED = {name: re.compile(pattern) for name, (pattern, _, _) in PATTERNS.items()}


def marks(text):
    """The names of the patterns that match a text; code within backticks does not count."""
    text = re.sub(r"`[^`]*`", "`x`", text)
    return [name for name, pattern in COMPILED.items() if pattern.search(text)]


def docstrings():
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            has_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if has_one and (text := ast.get_docstring(node)):
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def comments():
    """Joins the comments of consecutive lines, without those that are instructions to tools."""
    for file in (ROOT / "src").rglob("*.py"):
        first, last, lines = 0, -1, []
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
            if token.type != tokenize.COMMENT or re.match(r"# ?(?:noqa|type:|isort|fmt|ruff|!|----)", token.string):
                continue
            line = token.start[0]
            if line != last + 1 and lines:
                yield f"{file.relative_to(ROOT)}:{first}", " ".join(lines)
                lines = []
            first, last = line if not lines else first, line
            lines.append(token.string.lstrip("# "))
        if lines:
            yield f"{file.relative_to(ROOT)}:{first}", " ".join(lines)


def yaml_comments():
    for number, line in enumerate((ROOT / "configs" / "base.yml").read_text().splitlines(), 1):
        if (match := re.search(r"(?:^|\s)# (?!----)(.+)", line)) is not None:
            yield f"configs/base.yml:{number}", match[1]


def paragraphs(*files):
    for file in files:
        text = re.sub(r"^\s*```.*?^\s*```", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
        for block in re.split(r"\n\s*\n", re.sub(r"^#.*$", "", text, flags=re.MULTILINE)):
            if block.strip():
                yield str(file.relative_to(ROOT)), " ".join(block.split())


def pages():
    log = ROOT / "docs" / "log.md"
    return paragraphs(ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page != log))


KINDS = {
    "docstrings": docstrings,
    "comments": comments,
    "base.yml": yaml_comments,
    "README and docs": pages,
    "log": lambda: paragraphs(ROOT / "docs" / "log.md"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_marks_its_example_and_not_the_plain_one(name):
    _, marked, plain = PATTERNS[name]
    assert name in marks(marked)
    assert marks(plain) == []


@functools.cache
def texts(kind):
    return list(KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_few_texts_are_hard_to_read(kind):
    found = [(where, names, text) for where, text in texts(kind) if (names := marks(text))]
    assert len(texts(kind)) > 100
    share = len(found) / len(texts(kind))
    assert share <= MAX_SHARE, (
        f"{share:.1%} of the {len(texts(kind))} {kind} match a pattern; at most {MAX_SHARE:.0%} may. Rewrite some:\n"
        + "\n".join(f"{where}: {', '.join(names)}: {' '.join(text.split())[:120]}" for where, names, text in found)
    )
