r"""Moments of videos: the frames and the subtitles that are passages of a video's item.

The item of a video stands for its first frame, together with its text, which is its caption and its
subtitles. Its passages are the other frames, and the cues of its subtitles::

    item        talk.mp4   text "My talk\nWelcome.\nHere are kites."   frame at 0.4 s
    passages    0  0   5200       the frame at 5.2 s
                8  16  1000       the cue "Welcome." at 1 s
                17 32  7000       the cue "Here are kites." at 7 s
"""

from __future__ import annotations

from pathlib import Path

from genius_search.data.video import find_cue_spans, find_cues, read_video
from genius_search.index.items import Item
from genius_search.index.writer import Passage


def find_moments(item: Item, *, reads_images: bool) -> list[Passage]:
    """Return the passages of a video.

    Parameters
    ----------
    item
        The video with its text.
    reads_images
        Whether frames are encoded.

    Raises
    ------
    BadImage
        The video cannot be decoded.
    """
    path = Path(item.image or "")
    moments = read_video(path).moments[1:] if reads_images else ()
    frames = [Passage(0, 0, moment) for moment in moments]
    cues = [Passage(*span) for span in find_cue_spans(item.text or "", find_cues(path))]
    return frames + cues
