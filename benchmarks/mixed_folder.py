"""Ask 40 questions about a folder of 250 files of many kinds, indexed without a download.

Usage: python benchmarks/mixed_folder.py PHOTOS --out FOLDER [--kill] [--encoder ENCODER]

PHOTOS is a folder with ``images/`` and ``captions.jsonl`` of 150 or more photos with five captions
each. The script copies the photos with their first four captions, and draws notes, e-mails, PDFs,
screenshots, iPhone photos, raw photos, duplicates and videos with subtitles; ``--out`` keeps them.
It needs the extras languages, ocr, pdf, photos, places, video and words, and matplotlib.

Then it indexes the folder with the command line and asks questions in words. A question counts if
the right file is among the first three hits; for a moment of a video, if the hit also names the
second to within two. With ``--kill``, the command is killed in the middle again and again before it
may end. Prints each question, what was left out and why, CPU-seconds and sizes.
"""

from __future__ import annotations

import argparse
import datetime as dt
import email.message
import io
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pillow_heif
from matplotlib import font_manager
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from PIL import ExifTags, Image, ImageDraw, ImageFont

from genius_search import Index

HELD_OUT_CAPTION = 4
"""Position of the caption that is not written to the folder, and is a question."""
MAX_RANK = 3
MAX_SECONDS_OFF = 2.0
KILLS = 6


@dataclass(frozen=True)
class Question:
    """A question in words."""

    subject: str
    text: str
    answers: frozenset[str]
    """Names of the files that answer it."""
    second: float | None = None
    """Second of the moment of a video."""


NOTES = {
    "sourdough.md": (
        "Sourdough\n\nFeed the starter with rye flour at nine. Fold the dough four times, then "
        "let it rise overnight in the fridge."
    ),
    "bicycle.txt": (
        "The rear derailleur of the bicycle skips in the smallest gear. Turn the barrel "
        "adjuster half a turn, then check the chain for wear."
    ),
    "tomatoes.org": (
        "#+TITLE: Balcony\n\n* Tomatoes\nPlant the tomatoes after the last frost, and water them "
        "in the morning, never on the leaves."
    ),
    "moving.md": (
        "---\ntitle: Moving house\ndate: 2023-09-30\ntags: [flat, boxes]\n---\n\nThe landlord "
        "wants the keys by noon. Label every box with the room, and photograph the electricity "
        "meter."
    ),
    "insulin.rst": (
        "Diabetes\n========\n\nThe doctor changed the insulin dose to twelve units before "
        "breakfast."
    ),
    "chess.txt": (
        "In the Sicilian Defence, black answers the king's pawn with the pawn of the bishop."
    ),
    "volcano.html": (
        "<html><head><title>Iceland</title></head><body><nav>Home Contact</nav><p>We hiked to the "
        "volcano at night and watched the lava run down into the valley.</p></body></html>"
    ),
    "wedding.md": "The band plays until midnight; the vegetarian menu is for eleven guests.",
    "tax.txt": "Send the tax return with the receipts for the desk and the train tickets by July.",
    "piano.txt": "The piano tuner comes on Thursday; the lowest string of the left pedal buzzes.",
    "README": "Notes of the household. Each file is one subject.",
    "backup.py": (
        "def copy_photos(source, target):\n    '''Copy new photos to the external disk.'''\n"
    ),
}
"""Names of notes -> their contents."""
FILLER_SUBJECTS = [
    "dentist",
    "library",
    "garage",
    "garden",
    "insurance",
    "printer",
    "school",
    "choir",
    "market",
    "museum",
]
SCREENS = {
    "screen-01.png": ["BOARDING PASS", "Gate B42  Seat 17A", "Departure 06:55", "Reykjavik"],
    "screen-02.png": ["Invoice 2024-118", "Total due 431,50 EUR", "Payment within 14 days"],
    "screen-03.png": ["Wi-Fi password", "network: Lighthouse", "marmalade-77-otter"],
    "screen-04.png": ["Error 0x80070057", "The parameter is incorrect", "Retry   Cancel"],
    "screen-05.png": ["Your parcel is delayed", "Tracking JD014600003", "Expected on Friday"],
    "screen-06.png": ["Paracetamol 500 mg", "Take one tablet every six hours"],
    "screen-07.png": ["Rezept: Kartoffelsuppe", "Zwiebeln, Sellerie, Majoran"],
    "screen-08.png": ["Concert ticket", "Philharmonic Hall, Row 12", "Symphony No. 9"],
}
PLACES = {"iphone-1.heic": (38.7223, -9.1393), "iphone-2.heic": (64.1466, -21.9426)}
"""Photos with GPS coordinates: Lisbon and Reykjavik."""
TIMES = {
    "iphone-1.heic": "2021:03:14 10:00:00",
    "iphone-2.heic": "2019:11:02 16:20:00",
    "iphone-3.heic": "2022:08:19 18:00:00",
}
SCENES = [("harbour", 8), ("kitchen", 10), ("mountain", 9), ("concert", 7), ("market", 8)]
"""Scenes of the video, and the length of each in seconds."""
CUES = {
    "harbour": "The fishing boats come back to the harbour.",
    "kitchen": "Grandmother rolls out the dough for the dumplings.",
    "mountain": "From the summit we can see the glacier.",
    "concert": "The trumpet player begins his solo.",
    "market": "A woman sells cherries and apricots.",
}


def write_notes(folder: Path) -> None:
    """Write notes, e-mails, a notebook and documents of word processors."""
    for name, content in NOTES.items():
        (folder / name).write_text(content)
    for number, subject in enumerate(FILLER_SUBJECTS):
        text = f"Call the {subject} on day {number + 3}, and ask for the new opening hours."
        (folder / f"{subject}.txt").write_text(text)
    message = email.message.EmailMessage()
    message["Subject"] = "Keys of the cabin"
    message["From"], message["To"] = "Ingrid <ingrid@example.org>", "me@example.org"
    message.set_content("The keys of the cabin hang behind the blue shutter. Bring firewood.")
    (folder / "cabin.eml").write_bytes(bytes(message))
    cells = [{"cell_type": "markdown", "source": ["Rainfall by month, from the weather station."]}]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "rain.ipynb").write_text(json.dumps(notebook))
    body = (
        "<w:p><w:r><w:t>The lease of the allotment ends when the apples are ripe.</w:t></w:r></w:p>"
    )
    name = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    document = f'<w:document xmlns:w="{name}"><w:body>{body}</w:body></w:document>'
    with zipfile.ZipFile(folder / "allotment.docx", "w") as archive:
        archive.writestr("word/document.xml", document)


def write_pdfs(folder: Path) -> None:
    """Write PDF files of one page."""
    pages = {
        "warranty.pdf": "Warranty of the washing machine: five years on the motor.",
        "sailing.pdf": "Sailing course: knots, right of way at sea, and weather reports.",
        "menu.pdf": "Menu: lentil soup, grilled trout, almond cake.",
    }
    for number in range(7):
        pages[f"form-{number}.pdf"] = f"Form {number} of the town hall, with stamp and signature."
    for name, text in pages.items():
        figure = Figure(figsize=(6, 4))
        figure.text(0.1, 0.7, text)
        with PdfPages(folder / name) as file:
            file.savefig(figure)


def draw_screens(folder: Path) -> None:
    """Draw screenshots with lines of text."""
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), 30)
    for name, lines in SCREENS.items():
        image = Image.new("RGB", (900, 420), "white")
        drawing = ImageDraw.Draw(image)
        drawing.rectangle((0, 0, 900, 60), fill="#345")
        for number, line in enumerate(lines):
            drawing.text((40, 90 + 70 * number), line, fill="black", font=font)
        image.save(folder / name)


def make_exif(time_taken: str, coordinates: tuple[float, float] | None) -> Image.Exif:
    """Return EXIF data with the time of a photo and its latitude and longitude."""
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = time_taken
    if coordinates is not None:
        gps = exif.get_ifd(ExifTags.IFD.GPSInfo)
        latitude, longitude = coordinates
        gps[ExifTags.GPS.GPSLatitudeRef] = "N" if latitude >= 0 else "S"
        gps[ExifTags.GPS.GPSLatitude] = (abs(latitude), 0.0, 0.0)
        gps[ExifTags.GPS.GPSLongitudeRef] = "E" if longitude >= 0 else "W"
        gps[ExifTags.GPS.GPSLongitude] = (abs(longitude), 0.0, 0.0)
    return exif


def draw_photos(folder: Path) -> None:
    """Draw iPhone photos with times and places, and raw photos with previews."""
    pillow_heif.register_heif_opener()
    for number, (name, time_taken) in enumerate(TIMES.items()):
        image = Image.effect_mandelbrot((480, 360), (-2 + number / 9, -1, 1, 1), 40)
        image = image.convert("RGB")
        image.save(folder / name, exif=make_exif(time_taken, PLACES.get(name)))
    header = make_exif("2020:05:09 09:00:00", None)
    header.endian = "<"
    for number in range(3):
        file = io.BytesIO()
        Image.new("RGB", (600, 400), (80 * number, 90, 160)).save(file, "JPEG")
        data = (
            header.tobytes()[6:] + bytes(7) + file.getvalue() + random.Random(0).randbytes(60_000)
        )
        (folder / f"sunrise over the fjord {number}.nef").write_bytes(data)


def draw_video(folder: Path) -> dict[str, float]:
    """Draw a video with subtitles; return the second at which each scene begins."""
    size = (320, 240)
    video = cv2.VideoWriter(str(folder / "summer.mp4"), cv2.VideoWriter_fourcc(*"mp4v"), 10.0, size)
    starts: dict[str, float] = {}
    cues = []
    second = 0.0
    for number, (scene, length) in enumerate(SCENES):
        starts[scene] = second
        for frame_number in range(length * 10):
            frame = np.full((size[1], size[0], 3), (50 * number, 200 - 40 * number, 90), np.uint8)
            cv2.circle(frame, (20 + 2 * frame_number, 60 + 30 * number), 25, (255, 255, 255), -1)
            video.write(frame)
        begin, end = (dt.timedelta(seconds=value) for value in (second, second + length - 1))
        cues.append(f"{number + 1}\n0{begin},000 --> 0{end},000\n{CUES[scene]}\n")
        second += length
    video.release()
    (folder / "summer.srt").write_text("\n".join(cues))
    return starts


def copy_photos(photos: Path, folder: Path) -> list[tuple[str, str]]:
    """Copy photos with four captions each; return names and the captions that are questions."""
    folder.mkdir()
    table, questions = [], []
    for line in (photos / "captions.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = Path(row["image"]).name
        shutil.copy(photos / row["image"], folder / name)
        table.append(
            json.dumps({"file_name": name, "captions": row["captions"][:HELD_OUT_CAPTION]})
        )
        questions.append((name, row["captions"][HELD_OUT_CAPTION]))
    (folder / "metadata.jsonl").write_text("\n".join(table))
    return questions


def draw_folder(photos: Path, folder: Path) -> list[Question]:
    """Write the folder of 250 files, and return the questions."""
    folder.mkdir(parents=True)
    captions = copy_photos(photos, folder / "photos")
    for name, part in (("notes", write_notes), ("papers", write_pdfs), ("screens", draw_screens)):
        (folder / name).mkdir()
        part(folder / name)
    (folder / "phone").mkdir()
    draw_photos(folder / "phone")
    starts = draw_video(folder / "phone")
    duplicates = random.Random(1).sample(captions, 20)
    (folder / "copies").mkdir()
    for name, _ in duplicates:
        shutil.copy(folder / "photos" / name, folder / "copies" / f"copy of {name}")
    count = sum(path.is_file() for path in folder.rglob("*"))
    for number in range(250 - count):
        text = f"Shopping list {number}: milk, bread, {number} apples."
        (folder / "notes" / f"list-{number}.txt").write_text(text)
    return list_questions(captions, starts)


def list_questions(captions: list[tuple[str, str]], starts: dict[str, float]) -> list[Question]:
    """Return 40 questions."""
    cases = [
        ("photo", caption, [name, f"copy of {name}"])
        for name, caption in random.Random(2).sample(captions, 8)
    ]
    cases += [
        ("screen", "boarding pass gate B42", ["screen-01.png"]),
        ("screen", "invoice total due", ["screen-02.png"]),
        ("screen", "marmalade-77-otter", ["screen-03.png"]),
        ("screen", "error 0x80070057", ["screen-04.png"]),
        ("screen", "tracking number of the parcel", ["screen-05.png"]),
        ("screen", "paracetamol every six hours", ["screen-06.png"]),
        ("screen", "Kartoffelsuppe", ["screen-07.png"]),
        ("screen", "concert ticket Philharmonic", ["screen-08.png"]),
        ("month", "March 2021", ["iphone-1.heic"]),
        ("month", "photos of November 2019", ["iphone-2.heic"]),
        ("month", "August 2022", ["iphone-3.heic"]),
        ("place", "Lisbon", ["iphone-1.heic"]),
        ("place", "photo in Reykjavik Iceland", ["iphone-2.heic"]),
        ("name", "sunrise over the fjord", [f"sunrise over the fjord {n}.nef" for n in range(3)]),
        ("German", "Wann kommt der Klavierstimmer?", ["piano.txt"]),
        ("German", "Wie pflege ich Tomaten auf dem Balkon?", ["tomatoes.org"]),
        ("German", "Schlüssel der Hütte", ["cabin.eml"]),
        ("German", "Garantie der Waschmaschine", ["warranty.pdf"]),
        ("French", "la pâte monte toute la nuit", ["sourdough.md"]),
        ("text", "how to make bread rise", ["sourdough.md"]),
        ("text", "gears of my bike", ["bicycle.txt"]),
        ("text", "moving to another flat", ["moving.md"]),
        ("text", "medicine before breakfast", ["insulin.rst"]),
        ("text", "chess opening for black", ["chess.txt"]),
        ("text", "lava at night", ["volcano.html"]),
        ("text", "guests who eat no meat", ["wedding.md"]),
        ("text", "rain statistics", ["rain.ipynb"]),
        ("text", "end of the garden lease", ["allotment.docx"]),
        ("text", "course about boats and knots", ["sailing.pdf"]),
    ]
    questions = [Question(subject, text, frozenset(answers)) for subject, text, answers in cases]
    moments = [
        ("mountain", "view of the glacier"),
        ("kitchen", "grandmother makes dumplings"),
        ("concert", "trumpet solo"),
    ]
    questions += [
        Question("moment", text, frozenset(["summer.mp4"]), starts[scene])
        for scene, text in moments
    ]
    return questions


def index_folder(index: Path, folder: Path, encoder: str, *, kill: bool) -> float:
    """Index the folder by the command line, and return the CPU-seconds of the last command.

    With ``kill``, commands are killed six times before, later each time.
    """

    def next_command() -> list[str]:
        genius = [sys.executable, "-m", "genius_search", "index"]
        if (index / "index.json").exists():
            return [*genius, "sync", str(index)]
        return [*genius, "create", str(index), "--pool", str(folder), "--encoder", encoder]

    if kill:
        for number in range(KILLS):
            process = subprocess.Popen(
                next_command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(4 + 6 * number)
            process.send_signal(signal.SIGKILL)
            process.wait()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(next_command(), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rank_of(question: Question, search: Callable[[str], list]) -> int | None:
    """Return the rank of the first hit that answers the question."""
    for hit in search(question.text):
        if Path(hit.id).name not in question.answers:
            continue
        if question.second is None:
            return hit.rank
        if hit.moment is not None and abs(hit.moment - question.second) <= MAX_SECONDS_OFF:
            return hit.rank
    return None


def main() -> None:
    """Draw, index, ask and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--encoder", default="text:universal-sentence-encoder")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    folder, index_path = options.out / "mixed", options.out / "mixed.index"
    questions = draw_folder(options.photos, folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    print(f"{len(files)} files:", dict(Counter(path.suffix for path in files).most_common()))
    seconds = index_folder(index_path, folder, options.encoder, kill=options.kill)
    index = Index.open(index_path)
    print(f"indexed in {seconds:.0f} CPU-s (of the last run):", index.last_change)
    right: Counter[str] = Counter()
    for question in questions:
        rank = rank_of(question, lambda text: index.search(text, k=10))
        is_right = rank is not None and rank <= MAX_RANK
        right[question.subject] += is_right
        print(f"{rank or '-':>3}  {question.subject:8}  {question.text}")
    counts = Counter(question.subject for question in questions)
    for subject, count in counts.items():
        print(f"{subject:8}  {right[subject]} of {count}")
    print(f"{sum(right.values())} of {len(questions)} questions answered in the first {MAX_RANK}")


if __name__ == "__main__":
    main()
