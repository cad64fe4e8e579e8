"""Options of the command lines that are no configs: argparse, with errors as all others."""

import argparse

from kvjax.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse's, whose help is a module's docstring; what it cannot parse is a UserError."""

    def __init__(self, doc: str):
        super().__init__(
            description=doc.rstrip(),
            formatter_class=argparse.RawTextHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        raise UserError(message)
