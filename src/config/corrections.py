"""The command that was meant, where each wrong word of it has one certain correction."""

import difflib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence

from src.config.migration_hints import migration_hint
from src.config.schema import KEYS
from src.config.yaml import parse_argument
from src.errors import UserError


def corrected_command(argv: Sequence[str], load: Callable[[Sequence[str]], object]) -> str:
    """Returns a line with the whole corrected command, or "" unless `load` accepts it."""
    words = [corrected for word in _joined(argv) for corrected in _corrected(word)]
    files = [word for word in words if "=" not in word]  # of which a recipe that a word stands for is the last
    words = [*files[-1:], *(word for word in words if "=" in word)]
    if words == list(argv) or sum("=" not in word for word in _joined(argv)) > 1:
        return ""
    try:
        load(words)
    except (UserError, OSError):
        return ""
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    return f"\nType: python -m {module if module.startswith('src.') else 'src.train'} {shlex.join(words)}"


def _joined(argv: Sequence[str]) -> Iterator[str]:
    """Yields the words of a command line, a flag and its value (`--steps 100`) as one (`--steps=100`)."""
    words = list(argv)
    while words:
        word = words.pop(0)
        is_flag = word.startswith("--") and "=" not in word
        takes_next = is_flag and words and "=" not in words[0] and not words[0].startswith("--")
        yield f"{word}={words.pop(0)}" if takes_next else word


def _corrected(word: str) -> list[str]:
    """Returns what a word of a command line certainly meant; the word itself where that is unknown."""
    key, equals, text = word.lstrip("-").partition("=")
    if not equals or key.partition(".")[0] in KEYS:
        return [f"{key}{equals}{text}"]
    if hint := migration_hint(key, parse_argument(text, None, key)):
        return [] if hint.accepted else shlex.split(hint.instead) or [word]
    near = difflib.get_close_matches(key, KEYS, n=2, cutoff=0.9)
    return [f"{near[0]}={text}"] if len(near) == 1 else [word]
