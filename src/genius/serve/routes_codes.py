"""A look inside the codes over HTTP: the tree, what shares codes, and why an item is found or not."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from genius.codes import CodeNode, Explanation, LevelStep, SharedPage
from genius.index import Index
from genius.search.items import Item
from genius.serve import limits
from genius.serve.problems import Problem
from genius.serve.reading import read, unless_gone
from genius.serve.routes_search import body_of, config_of, request_of
from genius.serve.schemas import (
    CodeChildBody,
    CodeNodeBody,
    ExplainAnswer,
    ExplainBody,
    LevelBody,
    SharedAnswer,
    SharedGroupBody,
    SiblingBody,
)
from genius.serve.service import Here, IndexName, may_read, problems, send
from genius.serve.showing import show_example

router = APIRouter(prefix="/v1", dependencies=[Depends(may_read)], tags=["codes"])

NEIGHBOURS: Final = 12
"""Items that are shown of those that share codes with one."""

Offset = Annotated[int, Query(ge=0, le=10**9)]
Limit = Annotated[int, Query(ge=1, le=limits.GROUPS)]


@router.post(
    "/explain",
    summary="Why a search finds an item, or does not",
    response_model=ExplainAnswer,
    responses=problems(404, 408, 413, 415),
    openapi_extra=body_of("ExplainBody"),
)
async def explain(request: Request, here: Here) -> Response:
    """The way of the item's ID through the levels: each code's probability, and what else was there."""
    body, image = await read(request, ExplainBody)
    name = here.resolve(body.index)
    config = config_of(here.engine.indexes[name], body)
    asked = await request_of(here.pictures, body, image)

    def look(index: Index) -> tuple[Explanation, list[Item]]:
        explained = index.explain(asked, body.id, config=config)
        shared = [level.level for level in explained.levels if level.items > 1]
        prefix = explained.codes[: shared[-1] + 1] if shared else ()
        near = index.tree(prefix, examples=NEIGHBOURS + 1, most_children=0).examples
        return explained, [item for item in near if item.item_id != body.id][:NEIGHBOURS]

    explained, near = await unless_gone(request, here.engine.read(name, look))
    return send(
        ExplainAnswer(
            request_id=request.state.request_id,
            index=name,
            id=body.id,
            codes=list(explained.codes),
            is_allowed=explained.is_allowed,
            rank=explained.rank,
            score=explained.score,
            touched=explained.touched,
            beam=explained.beam,
            lost_at=explained.lost_at,
            kept_by_beam=explained.kept_by_beam,
            levels=[_level(name, level) for level in explained.levels],
            shares_prefix=[show_example(name, item) for item in near],
        )
    )


@router.get(
    "/codes",
    summary="A prefix of IDs, and what lies below it",
    response_model=CodeNodeBody,
    responses=problems(404),
)
async def codes(
    here: Here,
    index: IndexName = None,
    prefix: Annotated[str, Query(max_length=500, examples=["1,17"], description="Codes; empty: all.")] = "",
) -> Response:
    """How many items, which codes follow, and how evenly they divide the items."""
    name = here.resolve(index)
    wanted = _codes(prefix)
    node = await here.engine.read(
        name, lambda opened: (opened.tree(wanted), opened.tree(wanted, examples=NEIGHBOURS, most_children=0))
    )
    return send(_node(name, *node))


@router.get(
    "/codes/collisions",
    summary="Items that share their whole ID",
    response_model=SharedAnswer,
    responses=problems(404),
)
async def collisions(here: Here, index: IndexName = None, offset: Offset = 0, limit: Limit = 20) -> Response:
    """Groups, largest first."""
    name = here.resolve(index)
    page = await here.engine.read(name, lambda opened: opened.collisions(offset=offset, limit=limit))
    return send(_page(name, page))


@router.get(
    "/codes/duplicates",
    summary="Items that share all but the last codes of their IDs",
    response_model=SharedAnswer,
    responses=problems(404),
)
async def duplicates(
    here: Here,
    index: IndexName = None,
    levels: Annotated[int, Query(ge=0, le=64, description="So many of the last codes may differ.")] = 1,
    offset: Offset = 0,
    limit: Limit = 20,
) -> Response:
    """Groups, largest first: often the same thing twice."""
    name = here.resolve(index)
    page = await here.engine.read(
        name, lambda opened: opened.near_duplicates(levels, offset=offset, limit=limit)
    )
    return send(_page(name, page))


def _codes(prefix: str) -> list[int]:
    """``1,17`` as numbers."""
    parts = [part.strip() for part in prefix.split(",")] if prefix.strip() else []
    if not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in parts):
        raise Problem(422, "prefix: expected codes as whole numbers with commas between, as 1,17,203")
    return [int(part) for part in parts]


def _level(index: str, level: LevelStep) -> LevelBody:
    return LevelBody(
        level=level.level,
        name=level.name,
        code=level.code,
        log_probability=level.log_probability,
        probability=level.probability,
        rank_among_siblings=level.rank,
        num_siblings=level.num_siblings,
        items_below=level.items,
        kept=level.is_kept,
        siblings=[
            SiblingBody(
                code=one.code,
                log_probability=one.log_probability,
                probability=one.probability,
                items=one.items,
                examples=[show_example(index, item) for item in one.examples],
            )
            for one in level.siblings
        ],
    )


def _node(index: str, node: CodeNode, with_examples: CodeNode) -> CodeNodeBody:
    return CodeNodeBody(
        prefix=list(node.prefix),
        level=node.level,
        items=node.items,
        share=node.share,
        entropy=node.entropy if node.num_children else None,
        branches=node.num_children,
        children=[
            CodeChildBody(
                code=child.code,
                items=child.items,
                share=child.share,
                examples=[show_example(index, item) for item in child.examples],
            )
            for child in node.children
        ],
        examples=[show_example(index, item) for item in with_examples.examples],
        truncated=node.truncated,
    )


def _page(index: str, page: SharedPage) -> SharedAnswer:
    return SharedAnswer(
        total=page.total,
        items=page.items,
        groups=[
            SharedGroupBody(
                codes=list(group.codes),
                count=group.items,
                items=[show_example(index, item) for item in group.examples],
            )
            for group in page.groups
        ],
    )
