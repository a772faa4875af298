"""Opens an ONNX graph at once, however large: its weights stay in the file until they are used.

onnxruntime copies a file that holds graph and weights. So it gets the graph alone, in which large weights are
named by their places in the file; those it maps into memory. ONNX has such references for weights in other
files. Numbers of fields are those of `onnx.proto`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from genius_search.errors import ArtifactMismatch

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA = 7, 5, 9, 13
_IS_EXTERNAL: Final = b"\x70\x01"
"""The field ``data_location``."""
_FOLDER_OF_WEIGHTS: Final = "session.model_external_initializers_file_folder_path"
_LARGE: Final = 4096
"""Bytes of weights that stay in the file. Shapes are smaller; onnxruntime reads them from the graph."""


class _Field(NamedTuple):
    number: int
    key: int
    start: int
    end: int
    """Where in the file the key begins, the content begins and it ends."""


def open_graph(file: Path, *, packed: bool) -> InferenceSession:
    """Open a graph on the CPU.

    Parameters
    ----------
    packed
        Rearrange the weights first: each input is then a third quicker, but it takes as long as some of them.

    Raises
    ------
    ArtifactMismatch
        It is no graph that onnxruntime can run.
    """
    import onnxruntime  # noqa: PLC0415  takes a while

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.disable_prepacking", str(int(not packed)))
    whole = file.resolve()  # in the cache, a link
    try:
        with whole.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            graph = without_weights(data, whole.name)
            if len(graph) == len(data):  # its weights are small or in another file
                return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(whole.parent))
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  onnxruntime's errors have no common class
        raise ArtifactMismatch(f"{file} cannot be run by onnxruntime: {error}") from None


def without_weights(data: mmap.mmap, name: str) -> bytes:
    """Return a model in which the large weights of the file ``name`` are references to their places."""

    def refer(weights: _Field) -> bytes:
        size = weights.end - weights.start
        if size < _LARGE:
            return data[weights.key : weights.end]
        place = {"location": name, "offset": str(weights.start), "length": str(size)}
        pairs = (_message(1, key.encode()) + _message(2, value.encode()) for key, value in place.items())
        return _IS_EXTERNAL + b"".join(_message(_EXTERNAL_DATA, pair) for pair in pairs)

    def tensor(field: _Field) -> bytes:
        return _message(_INITIALIZER, _copy(data, field.start, field.end, _RAW_DATA, refer))

    def graph(field: _Field) -> bytes:
        return _message(_GRAPH, _copy(data, field.start, field.end, _INITIALIZER, tensor))

    return _copy(data, 0, len(data), _GRAPH, graph)


def _copy(data: mmap.mmap, start: int, end: int, number: int, change: Callable[[_Field], bytes]) -> bytes:
    """Return the message between two places, with its fields of one number changed."""
    fields = _fields(data, start, end)
    return b"".join(change(one) if one.number == number else data[one.key : one.end] for one in fields)


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    """Read a message in the wire format of protocol buffers."""
    while start < end:
        key, content = _number(data, start)
        kind, size = key & 7, 0
        if kind == 2:
            size, content = _number(data, content)
        elif kind == 0:
            _, after = _number(data, content)
            size = after - content
        else:
            size = 8 if kind == 1 else 4
        yield _Field(key >> 3, start, content, content + size)
        start = content + size


def _number(data: mmap.mmap, start: int) -> tuple[int, int]:
    """Return the number that begins at a place, and the place behind it."""
    value = 0
    for place in range(10):
        value |= (data[start + place] & 127) << 7 * place
        if data[start + place] < 128:
            return value, start + place + 1
    raise ValueError(f"it is damaged at byte {start}")


def _message(number: int, content: bytes) -> bytes:
    """Return a field that holds bytes."""
    size, digits = len(content), bytearray([number << 3 | 2])
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    return bytes([*digits, size]) + content
