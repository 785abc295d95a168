"""What the command gives to checks, for tests of one check."""

from src.extras.verify.subject import Context


def context(subject, compiled=(), **whole):
    """A subject, and keys of the config before it was made small."""
    return Context(subject, subject.config.replace(**whole), compiled=compiled)
