"""What kvjax.lm_eval uses of lm-evaluation-harness, where that is not installed.

As version 0.4.13 does it. Tests that are marked `lm_eval` ask the library itself.
"""

from collections.abc import Iterator
import contextlib
import importlib.machinery
import sys
import types
from typing import ClassVar

import kvjax.lm_eval

_IMPORT_IT = ("adapter", "tasks")  # modules of kvjax.lm_eval


class TemplateLM:
    """A model whose answers are kept by its hook."""

    def __init__(self):
        self.kept = []

        def add(*of):
            self.kept.append(of)

        self.cache_hook = types.SimpleNamespace(add_partial=add)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id

    @property
    def device(self):
        return self._device

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        asked = []
        for context, continuation in (request.args for request in requests):
            if context:
                pair = self._encode_pair(context, continuation)
            else:
                opened = [self.prefix_token_id]
                pair = opened, self.tok_encode(continuation, add_special_tokens=False)
            asked.append(((context, continuation), *pair))
        return self._loglikelihood_tokens(asked, disable_tqdm=disable_tqdm)


def windows(token_list, prefix_token, max_seq_len, context_len):
    """Yields what is read and what is predicted: each token once, after at least so many."""
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
    """The index of tasks: those of the library, and those of folders.

    Attributes:
      library: YAML configs by name; None: a tag.
      folders: the same by folder.
      made: the arguments of all that were made.
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
    said = types.SimpleNamespace(task=name, generation_kwargs=config.get("generation_kwargs"))
    return types.SimpleNamespace(
        config=said,
        OUTPUT_TYPE=config["output_type"],
        UNSAFE_CODE=config.get("unsafe_class", False),
        MULTIMODAL=config.get("multimodal", False),
    )


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """Puts modules of these names where Python looks for the library's; yields the package."""
    registered = {}
    model = dict(TemplateLM=TemplateLM)
    utils = dict(get_rolling_token_windows=windows, make_disjoint_window=disjoint)
    package = _module("lm_eval", __version__="0.4.13", registered=registered)
    package.utils = _module("lm_eval.utils", **utils)
    package.api = _module("lm_eval.api")
    package.api.model = _module("lm_eval.api.model", **model)
    package.api.registry = _module(
        "lm_eval.api.registry",
        register_model=lambda name: lambda of: registered.setdefault(name, of),
    )
    package.api.group = _module("lm_eval.api.group", Group=object)
    package.api.task = _module("lm_eval.api.task", Task=object)
    package.tasks = _module("lm_eval.tasks", TaskManager=TaskManager)
    try:
        yield package
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
            del sys.modules[name]
        for name in _IMPORT_IT:
            if sys.modules.pop(f"kvjax.lm_eval.{name}", None):
                delattr(kvjax.lm_eval, name)


def _module(name: str, **content) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    return module
