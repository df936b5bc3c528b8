"""The one kind of error that is the user's to mend; every command prints it as one sentence and exits with code 2."""


class UserError(ValueError):
    """Something the user gave cannot be used: the message says what was given, what is allowed, and what to change."""
