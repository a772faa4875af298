"""Looks a data set over before hours are spent on it: what is there, what is missing, what contradicts.

Everything is read line by line. What is kept for each id is a bit per pool, a byte and a checksum, and for
each picture a 64-bit hash, so that M-BEIR's millions fit in a small machine's memory.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from genius.data.check_findings import Finding, Findings
from genius.data.check_pictures import Pictures
from genius.data.check_pools import PoolCount, Pools
from genius.data.check_queries import Queries, QueryCount
from genius.data.mbeir import MBeir


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found; JSON-able through ``dataclasses.asdict``."""

    root: str
    name: str
    queries: tuple[QueryCount, ...]
    pools: tuple[PoolCount, ...]
    num_images: int
    """Different pictures that are referred to."""
    images_decoded: bool
    """False when it was only looked whether they are there."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is nothing worse than a warning."""
        return all(finding.severity != "error" for finding in self.findings)


def check(root: Path, *, decode_images: bool = True, workers: int = 2) -> CheckReport:
    """Look a folder in M-BEIR's layout over.

    Parameters
    ----------
    decode_images
        decode every picture; without, only look whether the files are there.
    workers
        threads that decode.

    Raises
    ------
    BadData
        the folder is not in M-BEIR's layout at all.
    """
    data = MBeir(root)
    findings = Findings()
    with closing(Pictures(data, findings, decode=decode_images, workers=workers)) as pictures:
        pools = Pools(findings, pictures)
        global_pools = sorted((root / "cand_pool" / "global").glob("*_cand_pool.jsonl"))
        members = {path: pools.read(root, path) for path in (*data.local_pools(), *global_pools)}
        if not members:
            findings.add("layout", f"{root / 'cand_pool'}: there is no pool")
        queries = Queries(data, findings, pictures, pools, members)
        for folder in sorted(path for path in (root / "query").iterdir() if path.is_dir()):
            queries.read_split(folder.name)
    queries.report_instructions()
    return CheckReport(
        root=str(root),
        name=data.name,
        queries=queries.counts(),
        pools=tuple(pools.counts),
        num_images=pictures.num_seen,
        images_decoded=decode_images,
        findings=findings.all(),
    )
