"""The error a user can mend: shown as one message, without a traceback."""

import traceback


class UserError(Exception):
    """Something the person who started the run can put right; the message says how."""


def explain(error: BaseException) -> str:
    """Return kind, message and place of an error in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UserError | SyntaxError) or not own:  # they say by themselves where
        return text
    file = own[-1].filename.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{text} ({own[-1].name}, {file}:{own[-1].lineno})"
