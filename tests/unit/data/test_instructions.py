import pytest

from genius_search.data.mbeir import InstructionKey, Instructions
from genius_search.errors import BadData, BadRecord
from genius_search.records import Modality
from research.mbeir_files import InstructionRow, write_instructions

TEXT, IMAGE, BOTH = Modality.TEXT, Modality.IMAGE, Modality.IMAGE_TEXT


def instruction_file(tmp_path, *rows, header=b"query_modality\tcand_modality\tname\tdataset_id\tprompt_1"):
    path = tmp_path / "query_instructions.tsv"
    path.write_bytes(b"".join(row + b"\n" for row in ([header] if header else []) + list(rows)))
    return path


def test_instructions_are_read_by_position_and_empty_cells_dropped(tmp_path):
    path = instruction_file(
        tmp_path,
        b"text\timage\tMSCOCO\t9\tFind me an image.\t\tShow, please\r",
        b"image,text\timage\tVisualNews\t0\tOne",
        header=b"a\tb\tc\td\te\tf\tg",
    )
    instructions = Instructions.read(path)
    assert instructions.lookup(9, TEXT, IMAGE) == ("Find me an image.", "Show, please")
    assert instructions.lookup(0, BOTH, IMAGE) == ("One",)
    assert set(instructions.rows) == {InstructionKey(9, TEXT, IMAGE), InstructionKey(0, BOTH, IMAGE)}


def test_a_stray_quote_does_not_swallow_the_rows_after_it(tmp_path):
    path = instruction_file(tmp_path, b'text\timage\tA\t1\t"Find it.', b"text\ttext\tA\t1\tOther")
    assert Instructions.read(path).lookup(1, TEXT, TEXT) == ("Other",)


def test_a_missing_instruction_says_what_is_missing_and_where(tmp_path):
    path = instruction_file(tmp_path, b"text\timage\tA\t1\tOne")
    with pytest.raises(BadData, match=r"data set 0, image -> image-text") as caught:
        Instructions.read(path).lookup(0, IMAGE, BOTH)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        b"text\timage\tA\t1",
        b"text\tvideo\tA\t1\tx",
        b"text\timage\tA\tone\tx",
        b"text\timage\tA\t1\t \t",
        b"\xff\t\t\t1\tx",
    ],
)
def test_a_bad_instruction_row_is_named(tmp_path, row):
    with pytest.raises(BadRecord) as caught:
        Instructions.read(instruction_file(tmp_path, row))
    assert caught.value.line == 2


def test_instructions_survive_writing(tmp_path):
    path = tmp_path / "i.tsv"
    rows = [
        InstructionRow(TEXT, IMAGE, "mine", 30, ("One, with comma", 'Two "quoted"')),
        InstructionRow(BOTH, TEXT, "mine", 30, ("Three",)),
    ]
    write_instructions(path, rows)
    read = Instructions.read(path)
    assert read.lookup(30, TEXT, IMAGE) == ("One, with comma", 'Two "quoted"')
    assert read.lookup(30, BOTH, TEXT) == ("Three",)
    with pytest.raises(BadData, match="tab"):
        write_instructions(path, [InstructionRow(TEXT, IMAGE, "mine", 30, ("a\tb",))])
