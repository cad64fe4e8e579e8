"""The cases, in groups: options, keys, files, processes.

Options come from the commands' parsers and keys from the configs, so new ones are tried at once.
"""

from tests.fuzz.case import Case
from tests.fuzz.commands import CONFIGS, EXPERIMENTS, PRODUCT
from tests.fuzz.files import file_cases
from tests.fuzz.keys import key_cases, section_cases
from tests.fuzz.options import option_cases
from tests.fuzz.processes import process_cases

GROUPS = {
    **{f"options of {command}": (option_cases, command) for command in (*PRODUCT, *EXPERIMENTS)},
    **{f"keys of {name}": (key_cases, name) for name in CONFIGS},
    "sections": (section_cases,),
    "files": (file_cases,),
    "processes": (process_cases,),
}


def cases_of(group: str) -> list[Case]:
    """Returns the cases of a group, each once."""
    make, *arguments = GROUPS[group]
    return list({repr(case): case for case in make(*arguments)}.values())
