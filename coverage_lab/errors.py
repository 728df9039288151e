"""Errors that a user can act on."""


class CoverageLabError(Exception):
    """A fault in the input or the environment, told in one line that names the thing and the way out.

    The command line prints the message and exits with code 2; the library raises it.
    """
