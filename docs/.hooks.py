"""Hooks of `make site`: changelog, links to the repository, pages for agents, external files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
EXTERNAL = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\ssrc=["']?(?:https?:)?//"""
    r"""|<link\b(?=[^>]*\srel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*\shref=["']?(?:https?:)?//"""
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the changelog, whose links start from the repository's folder."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show links to files outside of docs/ as plain text: they are not part of the site."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = link[2].partition("#")[0]
        if not target or "://" in target:
            return link[0]
        inside = (folder / target).resolve().is_relative_to(Path(config.docs_dir).resolve())
        return link[0] if inside and (folder / target).exists() else link[1]

    return LINK.sub(shown, markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Add each page as Markdown, as llms.txt names it."""
    for page in Path(config.docs_dir).glob("*.md"):
        shutil.copy(page, Path(config.site_dir) / page.name)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Raise an error where a page would load something from another server."""
    if found := EXTERNAL.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found.group()}")
    return output
