"""The project's documents, as GitHub and a package index read them: links, headings, code.

Knows Markdown as far as these documents use it, and GitHub's names for headings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = "https://github.com/rdzv-etcd/rdzv-etcd/blob/main/"
RAW = "https://raw.githubusercontent.com/rdzv-etcd/rdzv-etcd/main/"
"""Where a package index's page, which knows no files beside it, finds this repository's, and its
pictures."""

_FENCE = re.compile(r"^(```+)[^\n]*\n(.*?)^\1 *$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
_DEFINED = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.MULTILINE)
_USED = re.compile(r"\[[^\][]+\]\[([^\]]+)\]")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One Markdown file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _prose(self) -> str:
        """The text without blocks of code, and without inline code that looks like a link."""
        return re.sub(r"`[^`\n]*\]\([^`\n]*`", "", _FENCE.sub("", self.text))

    def links(self) -> list[str]:
        """Return every target, in links, images and definitions."""
        defined = [target for _, target in _DEFINED.findall(self._prose)]
        return _INLINE.findall(self._prose) + defined

    def undefined(self) -> set[str]:
        """Return the names of ``[text][name]`` that are defined nowhere."""
        return set(_USED.findall(self._prose)) - {name for name, _ in _DEFINED.findall(self._prose)}

    def anchors(self) -> set[str]:
        """Return GitHub's names of the headings."""
        found: dict[str, int] = {}
        for heading in _HEADING.findall(_FENCE.sub("", self.text)):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            found[name] = found.get(name, -1) + 1
        return {
            f"{name}-{n}" if n else name for name, last in found.items() for n in range(last + 1)
        }

    def code(self, language: str) -> list[str]:
        """Return the blocks of code in a language."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)

    def commands(self, name: str) -> str:
        """Return the shell commands of one marked block."""
        begin, end = f"<!-- commands:begin {name} -->\n```bash\n", "```\n<!-- commands:end -->\n"
        _, found, rest = self.text.partition(begin)
        commands, ended, _ = rest.partition(end)
        assert found, name
        assert ended, name
        return commands

    def unmarked(self) -> list[str]:
        """Return the blocks to run, in bash or Python, before which no comment names a test."""
        blocks = re.finditer(
            r"(?P<mark>-->\n)?^```(?:bash|python)\n(?P<code>.*?)^```$",
            self.text,
            re.DOTALL | re.MULTILINE,
        )
        return [block["code"] for block in blocks if block["mark"] is None]

    def broken(self) -> list[str]:
        """Return every link into this repository that leads nowhere."""
        return [link for link in self.links() if not self._leads_somewhere(link)]

    def _leads_somewhere(self, link: str) -> bool:
        target, _, anchor = link.partition("#")
        if target.startswith((HOME, RAW)):
            file = ROOT / target.removeprefix(HOME).removeprefix(RAW)
        elif re.match(r"[a-z]+:", target):
            return True  # another site's
        else:
            file = self.path.parent / target if target else self.path
        if not file.exists():
            return False
        return not anchor or (file.suffix == ".md" and anchor in Document(file).anchors())


def documents() -> list[Document]:
    """Return every document of the project."""
    places = (ROOT, ROOT / "docs", ROOT / "benchmarks")
    return [Document(path) for place in places for path in sorted(place.glob("*.md"))]
