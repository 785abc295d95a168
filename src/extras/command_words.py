"""Separates a command's own arguments from the keys of a config."""

from collections.abc import Collection, Sequence

from src.system.errors import UserError


def separate(argv: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the values of the arguments `name=value` that a command takes itself, "" if not given, and the others.

    Raises UserError for a name that is given twice or without a value.
    """
    own, words = dict.fromkeys(names, ""), list[str]()
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and name in own:
            if not value or own[name]:
                raise UserError(f"{word}: expected one {name}=, with a value")
            own[name] = value
        else:
            words.append(word)
    return own, words
