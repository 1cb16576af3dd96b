"""What the site takes from elsewhere: files of the repository, and the help of every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PICTURES = {"numbers/effect.svg": "cookbook/effect/effect.svg"}
"""Files of the repository that included pages show, by their place in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures of included pages."""
    for place, source in PICTURES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in `<!-- include: PATH -->` and `<!-- help -->`, and link papers."""
    markdown = re.sub(r"<!-- include: (\S+) -->", lambda match: included(match[1]), markdown)
    return link_papers(markdown).replace("<!-- help -->", "\n\n".join(help_texts()))


def link_papers(markdown: str) -> str:
    """Link every `arXiv NUMBER` that stands outside code, headings and links."""
    kept = r"```.*?```|`[^`\n]*`|\[[^\]]*\]\([^)]*\)|^#.*?$"

    def link(match: re.Match[str]) -> str:
        return match[0] if match[1] is None else f"[{match[0]}](https://arxiv.org/abs/{match[1]})"

    return re.sub(rf"{kept}|\barXiv:? ?(\d{{4}}\.\d{{5}})", link, markdown, flags=re.DOTALL | re.MULTILINE)


def included(path: str) -> str:
    """Return a Markdown file of the repository without its title, its links to files that the site has not."""
    text = re.sub(r"\A# .*\n", "", (ROOT / path).read_text(encoding="utf-8"))
    folder = PurePosixPath(path).parent
    shown = {source: PurePosixPath(place).name for place, source in PICTURES.items()}

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if re.match(r"https?:|#", target):
            return match[0]
        return f"![{label}]({shown[str(folder / target)]})" if mark else label

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


def help_texts() -> Iterator[str]:
    """Yield a section with the help of each command."""
    import typer

    from invariant_rag.cli import app

    def walk(command: Any, context: Any, name: str) -> Iterator[str]:
        yield f"## {name}\n\n```text\n{command.get_help(context).strip()}\n```"
        for each, below in sorted(getattr(command, "commands", {}).items()):
            title = f"{name} {each}"
            yield from walk(below, type(context)(below, info_name=each, parent=context, terminal_width=88), title)

    root = typer.main.get_command(app)
    yield from walk(root, root.context_class(root, info_name="invariant-rag", terminal_width=88), "invariant-rag")
