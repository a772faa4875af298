import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from genius_search.data.mbeir import IdColumn, read_candidates, read_pool, read_qrels, read_queries
from genius_search.records import TASKS, Candidate, Modality, Query, candidate_number, composed
from genius_search.text import clean
from research.mbeir_files import write_candidates, write_qrels, write_queries

words = (
    st.text(min_size=1, max_size=20).map(lambda text: clean(composed(text))).filter(str.strip)
)  # as they are read
ids = st.builds("{}:{}".format, st.integers(0, 60), st.integers(0, 3_000))
modalities = st.sampled_from(Modality)


@st.composite
def content(draw):
    modality = draw(modalities)
    text = draw(words) if modality is not Modality.IMAGE else None
    image = draw(words).replace("\0", "0") if modality is not Modality.TEXT else None
    return modality, text, image


# Strategies give plain tuples: beartype draws from `random` when it checks a record, which Hypothesis forbids here.
@st.composite
def queries(draw):
    modality, text, image = draw(content())
    some_ids = st.lists(ids, max_size=4, unique=True).map(tuple)
    source = draw(st.none() | st.text(max_size=10))
    task_id = draw(st.sampled_from(sorted(TASKS)))
    return draw(ids), modality, text, image, draw(some_ids), task_id, source


@st.composite
def candidates(draw):
    modality, text, image = draw(content())
    return draw(ids), modality, text, image, draw(st.none() | st.text(max_size=10))


@given(st.lists(queries(), max_size=6))
def test_queries_survive_writing_and_reading(fields):
    written = [Query(*values) for values in fields]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "q.jsonl"
        write_queries(path, written)
        assert list(read_queries(path)) == written
        first = path.read_bytes()
        write_queries(path, written)
        assert path.read_bytes() == first


@given(st.lists(candidates(), max_size=6))
def test_candidates_survive_writing_and_reading(fields):
    written = [Candidate(*values) for values in fields]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.jsonl"
        write_candidates(path, written)
        assert list(read_candidates(path)) == written


@given(st.lists(queries(), max_size=6, unique_by=lambda fields: fields[0]))
def test_qrels_say_what_the_positives_say(fields):
    written = [Query(*values) for values in fields]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "q.txt"
        write_qrels(path, written)
        expected = {
            query.qid: dict.fromkeys(query.positives, 1) for query in written if query.positives
        }
        assert read_qrels(path) == expected


@given(st.lists(st.lists(candidates(), max_size=5, unique_by=lambda fields: fields[0]), max_size=4))
def test_a_pool_of_several_files_holds_each_id_once_first_come(pools):
    files = [[Candidate(*values) for values in pool] for pool in pools]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.jsonl" for number in range(len(files))]
        for path, content_ in zip(paths, files, strict=True):
            write_candidates(path, content_)
        expected = {}
        for candidate in (candidate for file in files for candidate in file):
            expected.setdefault(candidate.did, candidate)
        assert list(read_pool(paths)) == list(expected.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
rows = st.dictionaries(
    st.sampled_from(["did", "txt", "img_path", "modality", "src_content"]),
    json_values | st.sampled_from(["9:1", "text", "image", "image,text"]),
)


@given(
    st.lists(st.binary(max_size=30) | rows.map(lambda row: json.dumps(row).encode()), max_size=8)
)
def test_whatever_a_file_holds_every_line_is_read_or_counted(raw):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.jsonl"
        path.write_bytes(b"\n\n\n\n" + b"\n".join(raw))  # the first four bytes tell the encoding
        bad = []
        good = list(read_candidates(path, on_bad=bad.append))
        assert len(good) + len(bad) == sum(
            bool(line.strip()) for line in path.read_bytes().split(b"\n")
        )


@given(st.lists(st.tuples(ids, st.integers(0, 255))), st.lists(ids))
def test_a_column_of_ids_reads_like_a_dict_of_zeros(pairs, others):
    column, expected = IdColumn(), {}
    for id_, value in pairs:
        assert column[candidate_number(id_)] == expected.get(id_, 0)
        column[candidate_number(id_)] = expected[id_] = value
    assert [column[candidate_number(id_)] for id_ in others] == [
        expected.get(id_, 0) for id_ in others
    ]
