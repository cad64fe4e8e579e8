"""The one exception of the sandbox."""


class SandboxError(Exception):
    """Nothing can be judged: no layer holds, or the problem is not one.

    The message says what was found and what would help. It is never about a candidate's program:
    whatever that does is a verdict.
    """
