"""MkDocs hooks for `make docs`: add pages outside docs/, rewrite links, insert generated tables.

Pages outside docs/ keep their path in the site. Links in a page are relative to the page's file.
Links to files that are not pages become addresses in the GitHub repository.
"""

import pathlib
import posixpath
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/kvjax/kvjax"
FOREIGN = ("AGENTS.md", "CHANGELOG.md", "configs/README.md", "experiments/*.md")
FOREIGN += ("experiments/reports/*.md", "experiments/figures/**/*.svg")
FOREIGN += ("experiments/results/**/*.png",)
_LINK = re.compile(r"(\]\()((?![a-z]+:|#)[^)\s#]+)(#[^)\s]*)?(\))")
_MADE = re.compile(r"<!-- made: (\w+)\.(\w+) -->")
_ANCHOR = re.compile(r'\bid="kvjax\.(\w+)"')


def foreign() -> list[str]:
    """Returns the repository's paths of pages and pictures outside docs/."""
    return sorted(str(path.relative_to(ROOT)) for glob in FOREIGN for path in ROOT.glob(glob))


def place(path: str) -> str:
    """Returns a file's path in the site, or its address on GitHub if the site does not have it."""
    if path in foreign():
        return path
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{path}"


def relinked(text: str, source: str) -> str:
    """Rewrites the links of a page for the site, outside blocks of code.

    Args:
      source: the page's path in the repository.
    """

    def moved(match: re.Match) -> str:
        start, link, anchor, end = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        target = place(path)
        if "://" not in target:
            target = posixpath.relpath(target, posixpath.dirname(place(source)) or ".")
        return f"{start}{target}{anchor or ''}{end}"

    parts = re.split(r"(?ms)(^```.*?^```$)", text)
    return "".join(part if i % 2 else _LINK.sub(moved, part) for i, part in enumerate(parts))


def made(text: str) -> str:
    """Replaces each `<!-- made: MODULE.FUNCTION -->` of a page by the function's result."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))

    def call(match: re.Match) -> str:
        module, function = match.groups()
        from docs.hooks import families, layouts, support  # import JAX

        modules = dict(families=families, layouts=layouts, support=support)
        if match[0] not in _results:
            _results[match[0]] = getattr(modules[module], function)()
        return _results[match[0]]

    return _MADE.sub(call, text)


_results: dict[str, str] = {}  # reused when `make docs-serve` rebuilds pages


def undocumented(html: str) -> list[str]:
    """Returns the public names of kvjax that a page of the API has no entry for."""
    import kvjax

    return sorted(set(kvjax.__all__) - set(_ANCHOR.findall(html)))


# -- events of MkDocs ------------------------------------------------------------------------------


def on_files(files, config):
    from mkdocs.structure.files import File

    for path in foreign():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    path = page.file.src_uri
    return made(relinked(markdown, path if path in foreign() else f"docs/{path}"))


def on_page_content(html, page, config, files):
    from mkdocs.exceptions import PluginError

    if page.file.src_uri == "api.md" and (missing := undocumented(html)):
        raise PluginError(f"docs/api.md has no {', '.join(missing)}")
