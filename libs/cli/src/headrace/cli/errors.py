"""What a command says when it cannot go on."""


class CommandError(Exception):
    """One sentence for a person: what is wrong, with which value, and the way out. Printed bare; exit status 1."""
