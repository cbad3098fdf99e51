"""The error a user can mend: shown as one message, without a traceback."""


class UserError(Exception):
    """Something the person who started the run can put right; the message says how."""
