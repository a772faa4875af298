"""Whether texts are in English."""

from __future__ import annotations

import pytest

from genius_search.languages import is_mostly_english

ENGLISH = "A dog plays with a ball in front of the house, and it is not tired."


@pytest.mark.parametrize(
    "text",
    [
        "Ein Hund spielt mit dem Ball vor dem Haus und ist nicht müde.",
        "Un chien joue avec une balle devant la maison, et il n'est pas fatigué.",
        "Un perro juega con una pelota frente a la casa y no está cansado.",
        "Un cane gioca con una palla davanti alla casa e non è stanco.",
        "Um cão brinca com uma bola em frente da casa e não está cansado.",
        "Een hond speelt met een bal voor het huis en is niet moe.",
        "Pies bawi się piłką przed domem i nie jest zmęczony.",
        "Собака играет с мячом перед домом.",
        "狗在房子前面玩球。",
        "犬が家の前でボールで遊ぶ",
        "كلب يلعب بالكرة أمام المنزل",
    ],
)
def test_texts_in_other_languages_are_noticed(text):
    assert not is_mostly_english([text])
    assert not is_mostly_english([text, text, ENGLISH])
    assert is_mostly_english([ENGLISH, ENGLISH, text])


def test_texts_without_a_language_count_as_english():
    assert is_mostly_english([])
    assert is_mostly_english(["IMG 2034", "", "x = [1, 2]", "Berlin 2024", "def f(x): return x"])
