"""Models and data sets of a hub by name, read from Hugging Face's cache.

    hf://OWNER/NAME                                  a model, its branch main
    hf://OWNER/NAME@REVISION                         another branch, a tag or a commit
    hf://OWNER/NAME/FILE.gguf                        one file of a model
    hf://datasets/OWNER/NAME[@REVISION]/PATH         a file, folder or glob of a data set

A process looks up the commit of a branch once. Files that the cache lacks are downloaded into it;
without a network, or with HF_HUB_OFFLINE, the cache must have them. HF_HOME moves the cache,
HF_ENDPOINT names another hub.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import fnmatch
import functools
import logging
import os
import re
import shlex
import types

from etils import epath

from kvjax.foundation import extras, json_text
from kvjax.foundation.errors import UserError, first_line, warn
from kvjax.foundation.files import write_atomically
from kvjax.foundation.text import check_text, listed

PREFIX = "hf://"
DATASETS = "datasets/"
MAGIC = "*?["
_FORM = re.compile(
    r"hf://(?P<kind>datasets/|models/)?(?P<repository>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 10  # time limit of a request to the hub
CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
# A model's files are in the repository's top folder.
_MODEL_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")
_UNREAD = ["*/*", "consolidated*.safetensors"]  # the latter: a copy in Mistral's own format
_WORDS = dict(model="model", dataset="data set")


@dataclasses.dataclass(frozen=True)
class Name:
    """A name of a repository, or of a path in it.

    Attributes:
      key: option or config key that holds the name, for messages.
      text: the name as it was given, for messages.
      kind: "model" or "dataset".
    """

    key: str
    text: str
    kind: str
    repository: str
    revision: str
    path: str

    @property
    def folder(self) -> epath.Path:
        """The repository's folder in the cache."""
        return _cache() / f"{self.kind}s--{self.repository.replace('/', '--')}"

    @property
    def repository_id(self) -> dict[str, str]:
        """Arguments of the client's functions."""
        return dict(repo_id=self.repository, repo_type=self.kind)

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.key} = {self.text!r}: {problem}")

    def absent(self, problem: str, offline: str) -> UserError:
        """Returns the error for files that are not in the cache while the hub is out of reach."""
        return self.error(f"{problem}, and {offline}: with a network, run {self.download}")

    @property
    def download(self) -> str:
        """The command that downloads the files."""
        words = ["hf", "download", self.repository]
        if self.kind == "dataset":
            words.append("--repo-type=dataset")
        if self.revision:
            words.append(f"--revision={self.revision}")
        if self.path and any(c in self.path for c in MAGIC):
            words.append(f"--include={self.path}")
        elif self.path:
            words.append(self.path if "." in self.path else f"{self.path}/")  # a folder
        return shlex.join(words)


def is_name(text: os.PathLike | str) -> bool:
    """Returns True for hf://..."""
    return os.fspath(text).startswith(PREFIX)


def parse(key: str, text: str, *, kind: str) -> Name:
    """Returns the parts of a name.

    Args:
      key: the option or config key that holds the name, for messages.
      kind: "model" or "dataset".

    Raises:
      UserError: the name has another form, or is of the other kind.
    """
    check_text(key, text)
    match = _FORM.fullmatch(text)
    forms = dict(model="OWNER/NAME", dataset=f"{DATASETS}OWNER/NAME/PATH")
    parts = (match["path"] or "").split("/") if match else [".."]
    if not match or {"", ".", ".."} & set(parts[:-1]) or parts[-1] in (".", ".."):
        raise UserError(f"{key} = {text!r}: give {PREFIX}{forms[kind]}, @REVISION behind the NAME")
    actual = "dataset" if match["kind"] == DATASETS else "model"
    if actual != kind:
        raise UserError(
            f"{key} = {text!r}: is a {_WORDS[actual]}; a {_WORDS[kind]} is {PREFIX}{forms[kind]}"
        )
    revision = (match["revision"] or "").replace("%2F", "/")
    return Name(key, text, kind, match["repository"], revision, (match["path"] or "").rstrip("/"))


def model(key: str, text: str) -> epath.Path:
    """Returns the folder of a model in the cache, or its GGUF file if the name has one.

    Raises:
      UserError: there is no such model, or its files are neither in the cache nor downloadable.
    """
    name = parse(key, text, kind="model")
    if name.path:
        return _file(name, name.path)
    commit, offline = _commit(name)
    if not offline:
        with _downloads(name) as client:
            client.snapshot_download(
                **name.repository_id,
                revision=commit,
                allow_patterns=[*_MODEL_FILES],
                ignore_patterns=_UNREAD,
            )
    folder = name.folder / "snapshots" / commit
    missing = _missing(folder) if offline else ()
    if missing:
        raise name.absent(f"{folder} lacks {listed(missing)}", offline)
    if not (folder / CONFIG).exists():
        raise name.error(f"has no {CONFIG}: give one of its files, as {PREFIX}OWNER/NAME/FILE.gguf")
    return folder


def config(key: str, text: str) -> epath.Path:
    """Returns a model's config.json, which is downloaded alone, or its GGUF file from the cache.

    Raises:
      UserError: see `model`; or the GGUF file is not in the cache.
    """
    name = parse(key, text, kind="model")
    return _file(name, name.path or CONFIG, downloads=not name.path)


def files(key: str, text: str, suffixes: Sequence[str]) -> epath.Path:
    """Downloads files of a data set; returns their path or glob in the cache.

    Args:
      suffixes: files of a folder or glob are downloaded if they end in one of these.

    Raises:
      UserError: see `model`.
    """
    name = parse(key, text, kind="dataset")
    commit, offline = _commit(name)
    folder = name.folder / "snapshots" / commit
    if offline:
        local = folder / name.path
        if not any(c in name.path for c in MAGIC) and not local.exists():
            raise name.absent(f"{local} does not exist", offline)
        warn(f"{key} = {text!r}: {offline}: only files that are in {folder} are read")
        return local
    with _downloads(name) as client:
        for path in _paths(client, name, commit, suffixes):
            client.hf_hub_download(**name.repository_id, filename=path, revision=commit)
    return folder / name.path


def _paths(
    client: types.ModuleType, name: Name, commit: str, suffixes: Sequence[str]
) -> Iterator[str]:
    """Yields the paths, in the repository, of the files that a name refers to."""
    pattern = name.path.split("/") if name.path else []
    first_glob = next((i for i, part in enumerate(pattern) if any(c in part for c in MAGIC)), None)
    if first_glob is None and name.path.lower().endswith(tuple(suffixes)):
        yield name.path
        return
    if first_glob is None:
        first_glob, pattern = len(pattern), [*pattern, "*"]
    entries = client.HfApi().list_repo_tree(
        **name.repository_id,
        path_in_repo="/".join(pattern[:first_glob]) or None,
        recursive=len(pattern) > first_glob + 1 or pattern[-1] == "**",
        revision=commit,
    )
    for entry in entries:
        is_file = isinstance(entry, client.hf_api.RepoFile)
        if is_file and entry.path.lower().endswith(tuple(suffixes)):
            if _matches(entry.path.split("/")[first_glob:], pattern[first_glob:]):
                yield entry.path


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Returns True if a path matches a glob part by part; ** matches any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (bool(parts) and _matches(parts[1:], pattern))
    first = bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0])
    return first and _matches(parts[1:], pattern[1:])


def _file(name: Name, path: str, *, downloads: bool = True) -> epath.Path:
    """Returns one file of a model in the cache."""
    name = dataclasses.replace(name, path="" if path == CONFIG else path)
    if not downloads:
        commit = _cached_commit(name)
        file = commit and name.folder / "snapshots" / commit / path
        if not file or not file.exists():
            raise name.error(f"is not in the cache, and may be large: run {name.download} first")
        return file
    commit, offline = _commit(name)
    file = name.folder / "snapshots" / commit / path
    if not offline:
        with _downloads(name) as client:
            client.hf_hub_download(**name.repository_id, filename=path, revision=commit)
    elif not file.exists():
        raise name.absent(f"{file} does not exist", offline)
    return file


def _missing(folder: epath.Path) -> list[str]:
    """Returns the files that a model needs and its folder lacks."""
    missing = [CONFIG] if not (folder / CONFIG).exists() else []
    if not any((folder / each).exists() for each in ("tokenizer.json", "tokenizer.model")):
        missing.append("tokenizer.json")
    if (folder / _INDEX).exists():
        index = json_text.read_object(folder / _INDEX, "download it again")
        shards = index.get("weight_map", {}).values() if isinstance(index, dict) else ()
        missing += [s for s in dict.fromkeys(map(str, shards)) if not (folder / s).exists()]
    elif not any(path.suffix == ".safetensors" and path.exists() for path in folder.iterdir()):
        missing.append("model.safetensors")
    return missing


def _cache() -> epath.Path:
    from huggingface_hub import constants

    return epath.Path(os.path.abspath(os.path.expanduser(constants.HF_HUB_CACHE)))


def _commit(name: Name) -> tuple[str, str]:
    """Returns the commit of a name's revision, and why the hub is out of reach ("" if it is not).

    Raises:
      UserError: there is no such repository or revision, or the hub is out of reach and the cache
        does not have it.
    """
    extras.require(name.text, "huggingface_hub")
    commit, offline = _looked_up(name.kind, name.repository, name.revision)
    if isinstance(commit, Exception):
        raise name.error(_refusal(commit, name)) from commit
    if offline:
        commit = _cached_commit(name)
        if commit is None:
            raise name.absent(f"is not in the cache {_cache()}", offline)
    else:
        _remember(name, commit)
    return commit, offline


@functools.cache
def _looked_up(kind: str, repository: str, revision: str) -> tuple[str | Exception, str]:
    """Asks the hub for a revision's commit; returns (commit or refusal, why it is out of reach)."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return "", "HF_HUB_OFFLINE is set"
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        info = huggingface_hub.HfApi().repo_info(
            repository, repo_type=kind, revision=revision or None, timeout=_SECONDS
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        return error, ""
    except Exception as error:  # network errors: the client's HTTP library differs by version
        return "", f"{constants.ENDPOINT} cannot be reached ({first_line(error)})"
    return info.sha, ""


def _refusal(error: Exception, name: Name) -> str:
    """Returns the message for a name that the hub refuses."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "is gated: accept its terms on its page, create a token there, and run hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no branch, tag or commit {name.revision!r}"
    if isinstance(error, errors.EntryNotFoundError):
        return "the repository has no such file"
    return f"there is no such {_WORDS[name.kind]}, or it is private (then run hf auth login first)"


def _remember(name: Name, commit: str) -> None:
    """Stores the commit of a branch in the cache for later use offline, as the client does."""
    if _COMMIT.fullmatch(name.revision):
        return
    ref = name.folder / "refs" / (name.revision or "main")
    with contextlib.suppress(OSError):  # a cache that cannot be written to
        if not ref.exists() or ref.read_text() != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, commit)


def _cached_commit(name: Name) -> str | None:
    """Returns the commit of a name's revision, from the cache alone; None if it has none."""
    snapshots, ref = name.folder / "snapshots", name.folder / "refs" / (name.revision or "main")
    if not snapshots.is_dir():
        return None
    commits = [path.name for path in snapshots.iterdir() if path.is_dir()]
    commit = name.revision
    with contextlib.suppress(OSError, UnicodeDecodeError):
        commit = ref.read_text().strip()
    if not commit and len(commits) == 1:
        return commits[0]
    return commit if commit in commits else None


@contextlib.contextmanager
def _downloads(name: Name) -> Iterator[types.ModuleType]:
    """Yields the client; turns its errors into UserErrors."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        yield huggingface_hub
    except errors.LocalEntryNotFoundError as error:  # the network failed midway
        why = first_line(error.__cause__ or error)
        raise name.error(f"{why}: finished files stay; run the same command again") from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        raise name.error(_refusal(error, name)) from error
    except Exception as error:  # errors of the client, its HTTP library or the disk
        why = getattr(error, "strerror", None) or first_line(error)
        raise name.error(
            f"cannot be downloaded into {_cache()}: {why}. Finished files stay: run the same "
            "command again"
        ) from error
