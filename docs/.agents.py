"""Write docs/llms.txt and a skill for agents from docs/.agents.toml: `python docs/.agents.py`.

The first has the format of llmstxt.org, the second that of agentskills.io.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def documents() -> dict[Path, str]:
    """Return the text of each file."""
    source = tomllib.loads((ROOT / "docs" / ".agents.toml").read_text(encoding="utf-8"))
    skill = ROOT / "skills" / source["name"] / "SKILL.md"
    return {ROOT / "docs" / "llms.txt": llms_txt(source), skill: skill_text(source)}


def llms_txt(source: dict[str, Any]) -> str:
    """Return a title, a summary, the commands, and links to the pages by section."""
    # In this format, only lists of links have headings.
    usage = re.sub(r"^## (.*)$", r"**\1**", source["usage"].strip(), flags=re.MULTILINE)
    sections = itertools.groupby(source["pages"], key=lambda page: page["section"])
    links = [f"## {name}\n\n" + "\n".join(map(link, pages)) for name, pages in sections]
    return "\n\n".join([f"# {source['title']}", f"> {source['summary']}", usage, *links]) + "\n"


def link(page: dict[str, str]) -> str:
    """Return the line of a page, with its title; the site has pages as Markdown, too."""
    title = (ROOT / "docs" / page["file"]).read_text(encoding="utf-8").splitlines()[0]
    return f"- [{title.removeprefix('# ')}]({page['file']}): {page['about']}"


def skill_text(source: dict[str, Any]) -> str:
    """Return the skill: its name and when to use it, then the commands."""
    front = [
        "---",
        f"name: {source['name']}",
        f"description: {source['description'].strip()}",
        "---",
    ]
    install = (
        "If `genius --help` fails, install the package from a copy of its repository: "
        "`pip install -c constraints.txt '.[folder]'`. `genius COMMAND --help` lists all options."
    )
    usage = source["usage"].strip()
    sections = ["\n".join(front), f"# {source['title']}", source["summary"], install, usage]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
