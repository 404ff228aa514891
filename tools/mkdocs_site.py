"""What the site needs beyond the files in docs/, which are written for GitHub: a hook of MkDocs.

The front page is the README's first part. Links that lead out of docs/ become links to the
repository, or to the few files outside that are pages of the site as well. The reference of the
library's names is a page that exists in the site only. Cells know their column's heading, which
docs/site.css shows where a screen is too narrow for columns.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import rdzv_etcd

ROOT = Path(__file__).parents[1]
HOME = "https://github.com/rdzv-etcd/rdzv-etcd/blob/main/"
RAW = "https://raw.githubusercontent.com/rdzv-etcd/rdzv-etcd/main/"
"""As HOME, for pictures."""
SHOWN = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Documents beside docs/ that are pages of the site."""
FRONT, FRONT_ENDS = "index.md", "<!-- the front page of the site ends here -->"

_LINK = re.compile(
    rf"(\]\(|^\[[^\]\n]+\]: )(?:({re.escape(HOME)}|{re.escape(RAW)})|(?![a-z]+:|#))([^)\s#]+)",
    re.MULTILINE,
)
_DEFINITION = re.compile(r"^\[[^\]\n]+\]: \S+\n", re.MULTILINE)
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):(<code[^>]*>)(?:~[\w.]*\.)?")
_TITLE = "# The library, name by name\n\nWhat `import rdzv_etcd` brings, from the docstrings.\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in [ROOT / name for name in SHOWN] + _plots():
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, FRONT, content=_front()))
    files.append(File.generated(config, "api.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_others: object) -> str:
    source = PurePosixPath(page.file.src_uri)
    folder = PurePosixPath() if source.name in SHOWN else PurePosixPath("docs") / source.parent

    def link(found: re.Match[str]) -> str:
        name = found[3] if found[2] else os.path.normpath(folder / found[3])
        here = name.removeprefix("docs/")
        if name.startswith("docs/") or files.get_file_from_path(here) is not None:
            return found[1] + os.path.relpath(here, source.parent)
        return f"{found[1]}{HOME}{name}"

    return _LINK.sub(link, markdown)


def on_page_content(content: str, page: Page, **_others: object) -> str:
    """Docstrings mark names as Sphinx does; what is left of that is the name."""
    if page.file.src_uri == "api.md":
        return _ROLE.sub(r"\1", content)
    return _TABLE.sub(lambda found: _with_headings(found[0]), content)


def on_post_page(output: str, **_others: object) -> str:
    """The theme's script would ask GitHub for numbers to show beside this link."""
    return output.replace(' data-md-component="source"', "")


on_post_template = on_post_page  # 404.html


def _with_headings(table: str) -> str:
    headings = [html.escape(re.sub("<.*?>", "", cell)) for cell in _HEADING.findall(table)]

    def row(found: re.Match[str]) -> str:
        labels = iter(headings)
        return re.sub("<td", lambda _: f'<td data-heading="{next(labels)}"', found[0])

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.DOTALL)


def _front() -> str:
    front, end, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(FRONT_ENDS)
    if not end:
        raise ValueError(f"README.md has no {FRONT_ENDS}")
    return front + "".join(_DEFINITION.findall(rest))


def _plots() -> list[Path]:
    return sorted((ROOT / "benchmarks" / "results").glob("*.svg"))


def _reference() -> str:
    names = [name for name in rdzv_etcd.__all__ if name not in ("__version__", "aio", "errors")]
    parts = [_TITLE, *(f"::: {_home(name)}.{name}\n" for name in names)]
    for module in ("rdzv_etcd.errors", "rdzv_etcd.aio", "rdzv_etcd.torch"):
        parts.append(f"## On its own: `{module}`\n\n::: {module}\n")
    return "\n".join(parts)


def _home(name: str) -> str:
    """Where it is defined: the public name itself is made when it is first used."""
    return str(getattr(getattr(rdzv_etcd, name), "__module__", "rdzv_etcd"))
