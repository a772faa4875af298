"""A page of figures and tables: one HTML file that fetches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources

from genius.report.markup import picture, shown


def page(
    title: str,
    about: Mapping[str, object],
    figures: Sequence[tuple[str, str, bytes]],
    tables: Sequence[tuple[str, str, Sequence[str], Sequence[Sequence[str]]]],
) -> str:
    """The whole document.

    Parameters
    ----------
    figures
        title, description for those who cannot see it, PNG file.
    tables
        title, how to read it, headings, lines.
    """
    style = resources.files("genius.bench").joinpath("page.css").read_text(encoding="utf-8")
    facts = "".join(
        f"<div><dt>{shown(name)}</dt><dd>{shown(str(value))}</dd></div>" for name, value in about.items()
    )
    drawn = "".join(
        f"<figure><figcaption>{shown(name)}</figcaption>{picture(image, alt)}</figure>"
        for name, alt, image in figures
    )
    listed = "".join(_table(*table) for table in tables)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{shown(title)}</title>
<style>
{style}
</style>
</head>
<body>
<main>
<h1>{shown(title)}</h1>
<dl>{facts}</dl>
{drawn}
{listed}
</main>
</body>
</html>
"""


def _table(title: str, note: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{shown(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{shown(line[0])}</th>'
        + "".join(f"<td>{shown(cell)}</td>" for cell in line[1:])
        + "</tr>"
        for line in lines
    )
    return f"""<section>
<h2>{shown(title)}</h2>
<p>{shown(note)}</p>
<div class="scroll" tabindex="0" role="region" aria-label="{shown(title)}">
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
</div>
</section>"""
