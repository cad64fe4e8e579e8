"""A stand-in for the parts of lm-evaluation-harness that kvjax.lm_eval uses.

Behaves as version 0.4.13. Tests marked `lm_eval` use the library itself.
"""

from collections.abc import Iterator
import contextlib
import importlib.machinery
import sys
import types
from typing import ClassVar

import kvjax.lm_eval

_IMPORTERS = ("adapter", "tasks")  # modules of kvjax.lm_eval that import the library


class TemplateLM:
    """A model base class whose hook stores answers."""

    def __init__(self):
        self.kept = []

        def add(*entry):
            self.kept.append(entry)

        self.cache_hook = types.SimpleNamespace(add_partial=add)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id

    @property
    def device(self):
        return self._device

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        encoded = []
        for context, continuation in (request.args for request in requests):
            if context:
                pair = self._encode_pair(context, continuation)
            else:
                opened = [self.prefix_token_id]
                pair = opened, self.tok_encode(continuation, add_special_tokens=False)
            encoded.append(((context, continuation), *pair))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)


def windows(token_list, prefix_token, max_seq_len, context_len):
    """Yields (context, predicted tokens) windows: each token once, after a minimum context."""
    first = token_list[:max_seq_len]
    if first:
        yield [prefix_token, *first[:-1]], first
    step = max_seq_len - context_len + 1
    for start in range(max_seq_len, len(token_list), step):
        end = min(start + step, len(token_list))
        yield token_list[end - max_seq_len - 1 : end - 1], token_list[start:end]


def disjoint(window):
    read, predicted = window
    return read[: len(read) - (len(predicted) - 1)], predicted


class TaskManager:
    """An index of tasks of the library and of folders.

    Attributes:
      library: YAML configs by name; None: a tag.
      folders: further configs by folder.
      made: the arguments of all instances.
    """

    library: ClassVar[dict] = {}
    folders: ClassVar[dict] = {}
    made: ClassVar[list] = []

    def __init__(self, include_path=None, include_defaults=True):
        self.made.append((include_path, include_defaults))
        configs = self.library if include_defaults else {}
        configs = configs | self.folders.get(include_path, {})
        self.task_index = {
            name: types.SimpleNamespace(
                cfg=config, tags={n for n, c in configs.items() if c and c.get("tag") == name}
            )
            for name, config in configs.items()
        }
        self.all_tasks = sorted(self.task_index)

    def load(self, name: str) -> dict:
        entry = self.task_index[name]
        if entry.cfg is None:
            return dict(tasks={n: _task(n, self.task_index[n].cfg) for n in entry.tags}, groups={})
        if "group" in entry.cfg:
            named = [member for member in entry.cfg["task"] if isinstance(member, str)]
            members = {n: _task(n, self.task_index[n].cfg) for n in named}
            return dict(tasks=members, groups={name: f"the group {name}"})
        return dict(tasks={name: _task(name, entry.cfg)}, groups={})


def _task(name: str, config: dict):
    task_config = types.SimpleNamespace(
        task=name, generation_kwargs=config.get("generation_kwargs")
    )
    return types.SimpleNamespace(
        config=task_config,
        OUTPUT_TYPE=config["output_type"],
        UNSAFE_CODE=config.get("unsafe_class", False),
        MULTIMODAL=config.get("multimodal", False),
    )


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """Installs stand-in modules under the library's names; yields the package."""
    registered = {}
    model = dict(TemplateLM=TemplateLM)
    utils = dict(get_rolling_token_windows=windows, make_disjoint_window=disjoint)
    package = _module("lm_eval", __version__="0.4.13", registered=registered)
    package.utils = _module("lm_eval.utils", **utils)
    package.api = _module("lm_eval.api")
    package.api.model = _module("lm_eval.api.model", **model)
    package.api.registry = _module(
        "lm_eval.api.registry",
        register_model=lambda name: lambda cls: registered.setdefault(name, cls),
    )
    package.api.group = _module("lm_eval.api.group", Group=object)
    package.api.task = _module("lm_eval.api.task", Task=object)
    package.tasks = _module("lm_eval.tasks", TaskManager=TaskManager)
    try:
        yield package
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
            del sys.modules[name]
        for name in _IMPORTERS:
            if sys.modules.pop(f"kvjax.lm_eval.{name}", None):
                delattr(kvjax.lm_eval, name)


def _module(name: str, **content) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    return module


# Tasks of the library, and of a folder.
CHOICES = dict(output_type="multiple_choice")
WRITES = dict(output_type="generate_until")
UNSAFE = WRITES | dict(unsafe_code=True)
LIBRARY = dict(
    arc_easy=CHOICES | dict(tag="arc"),
    arc_challenge=CHOICES | dict(tag="arc"),
    arc=None,
    humaneval=UNSAFE | dict(tag="code"),
    code=None,
    both=dict(group="both", task=["arc_easy", "gsm8k"]),
    gsm8k=WRITES | dict(generation_kwargs=dict(max_gen_toks=9)),
    beams=WRITES | dict(generation_kwargs=dict(num_beams=4)),
    texts=dict(output_type="loglikelihood_rolling"),
    pictures=WRITES | dict(multimodal=True),
    written=WRITES | dict(unsafe_class=True),
    holds=dict(group="holds", task=[dict(task="humaneval"), "arc_easy"]),
    told=dict(group="told", task=[dict(task="inner", unsafe_code=True)]),
    deep=dict(group="deep", task=["loop"]),
    loop=dict(group="loop", task=["deep", dict(group="holds")]),
    broken=dict(),
    **{f"blimp_{i}": CHOICES for i in range(7)},
)
OWN = dict(
    mine=CHOICES,
    of_both=dict(group="of_both", task=["mine", "arc_easy"]),
    in_place=dict(group="in_place", task=[CHOICES | dict(task="inner"), "mine"]),
)
