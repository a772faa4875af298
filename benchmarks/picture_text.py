"""Draw 200 lines of text in five languages, index the pictures, and search for each line.

Usage: python benchmarks/picture_text.py PHOTOS --out FOLDER

PHOTOS is a folder with ``images/*.jpg``, which are the background of half of the pictures. A
picture of 1280 x 720 has five lines, in one of three fonts and two sizes each. Prints the share of
lines that are found as a phrase in their picture, the share whose first hit has the line, and the
CPU-seconds of a picture. Needs the extras ocr and words, and matplotlib for its fonts.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import NamedTuple

from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from genius_search import Index

LINES = {
    "English": (
        "The meeting moves to Tuesday at noon",
        "Please return the library books soon",
        "Fresh bread and butter every morning",
        "Turn left after the old stone bridge",
        "Battery low, connect the charger now",
        "Two tickets for the evening concert",
        "The garden opens again in spring",
        "Keep this door closed at night",
    ),
    "German": (
        "Der Zug nach München fährt um acht",
        "Bitte die Schlüssel nicht vergessen",
        "Frische Brötchen jeden Morgen",
        "Öffnungszeiten während der Ferien",
        "Die Prüfung beginnt pünktlich",
        "Straße wegen Bauarbeiten gesperrt",
        "Schöne Grüße aus den Bergen",
        "Rechnung über dreißig Euro",
    ),
    "French": (
        "Le train arrive à la gare centrale",
        "Fermé le dimanche après-midi",
        "Une baguette et deux croissants",
        "Défense de fumer dans la forêt",
        "Le musée ouvre à neuf heures",
        "Château à vendre près de la mer",
        "Réunion de l'équipe demain matin",
        "Gâteau au chocolat très léger",
    ),
    "Spanish": (
        "La reunión empieza a las nueve",
        "Cerrado por vacaciones de agosto",
        "El niño juega en la playa",
        "Mañana vamos a la montaña",
        "Pan recién hecho cada día",
        "Prohibido aparcar en esta calle",
        "Feliz cumpleaños abuela Teresa",
        "Próxima estación plaza mayor",
    ),
    "Italian": (
        "Il museo è chiuso il lunedì",
        "Gelato artigianale di pistacchio",
        "La città vecchia è bellissima",
        "Vietato l'ingresso ai cani",
        "Domani pioverà in montagna",
        "Ricevuta di pagamento numero sette",
        "Perché non vieni con noi",
        "Caffè e cornetto a colazione",
    ),
}
FONTS = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")
SIZES = (18, 36)
LINES_PER_LANGUAGE = 40
LINES_PER_PICTURE = 5
SIZE = (1280, 720)


class DrawnLine(NamedTuple):
    """A line of a picture."""

    text: str
    font: str
    size: int


def choose_lines() -> list[DrawnLine]:
    """Return 200 lines in a random order, each text in different fonts and sizes."""
    lines = [
        DrawnLine(texts[n % 8], FONTS[(n // 8 + n) % len(FONTS)], SIZES[n // 8 % 2])
        for texts in LINES.values()
        for n in range(LINES_PER_LANGUAGE)
    ]
    random.Random(0).shuffle(lines)
    return lines


def draw_picture(path: Path, lines: list[DrawnLine], photo: Path | None) -> None:
    """Draw lines onto a photo, each on a white ground, or onto a plain colour."""
    draws = random.Random(path.name)
    ground = draws.choice(["white", "#222", "#eef"])
    image = Image.new("RGB", SIZE, ground)
    if photo is not None:
        image = Image.open(photo).convert("RGB").resize(SIZE)
    drawing = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/{line.font}", line.size)
        corner = (draws.randint(20, 200), 60 + 120 * number)
        if photo is not None:
            left, top, right, bottom = drawing.textbbox(corner, line.text, font=font)
            drawing.rectangle((left - 6, top - 6, right + 6, bottom + 6), fill="white")
        is_dark = photo is None and ground == "#222"
        drawing.text(corner, line.text, font=font, fill="white" if is_dark else "black")
    image.save(path)


def draw_pictures(photos: list[Path], folder: Path) -> dict[str, list[DrawnLine]]:
    """Draw all pictures; return the lines of each by its name."""
    folder.mkdir(parents=True)
    lines = choose_lines()
    pictures = {}
    for number in range(len(lines) // LINES_PER_PICTURE):
        name = f"IMG_{number:04d}.png"
        pictures[name] = lines[LINES_PER_PICTURE * number : LINES_PER_PICTURE * (number + 1)]
        photo = photos[number % len(photos)] if number % 2 else None
        draw_picture(folder / name, pictures[name], photo)
    return pictures


def main() -> None:
    """Draw, index, search and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    photos = sorted((options.photos / "images").glob("*.jpg"))
    pictures = draw_pictures(photos, options.out / "pictures")
    index_folder = options.out / "pictures.index"
    index = Index.create(index_folder, options.out / "pictures", encoder="text:wordllama")
    start = time.process_time()
    index.read_pictures()
    seconds = (time.process_time() - start) / len(pictures)
    num_phrases = num_first = num_lines = 0
    for name, lines in pictures.items():
        for line in lines:
            num_lines += 1
            phrase = line.text.replace(",", " ").replace("'", " ")
            is_found = name in {hit.id for hit in index.search(match=f'"{phrase}"', k=100)}
            num_phrases += is_found
            first = index.search(line.text, k=1)[0].id
            num_first += line.text in {other.text for other in pictures[first]}
            if not is_found:
                print(f"not found: {line} in {name}")
    print(f"{seconds:.2f} CPU-s a picture of {SIZE[0]} x {SIZE[1]} with five lines")
    print(f"found as a phrase: {num_phrases} of {num_lines}; first hit: {num_first}")


if __name__ == "__main__":
    main()
