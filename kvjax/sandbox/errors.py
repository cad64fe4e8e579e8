"""The one exception of the sandbox."""


class SandboxError(Exception):
    """Nothing can be judged: no layer holds, or the problem is invalid.

    The message names the cause and a remedy. It is never about a candidate's program, whose every
    behaviour is a verdict.
    """
