from __future__ import annotations

import pytest

from genius_search.picture_words import describe_picture, find_place, find_sources


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rome/2019/beach-walk_2.jpg", "rome, 2019, beach walk"),
        ("beach-rome_2019.jpg", "beach rome 2019"),
        ("MyDog.jpg", "My Dog"),
        ("Ñandú über Köln.jpg", "Ñandú über Köln"),
        ("北京.jpg", "北京"),
        ("IMG_20240501_123000.jpg", "May 2024"),
        ("IMG-20240501-WA0001.jpg", "May 2024"),
        ("PXL_20210304_112233444.NIGHT.jpg", "March 2021"),
        ("Screenshot 2024-05-01.png", "Screenshot, May 2024"),
        *(
            (name, None)
            for name in (
                "DCIM/100CANON/IMG_2031.jpg",
                "DSC01234.JPG",
                "P1010001.jpg",
                "photo.jpg",
                "000000123.jpg",
                "3f2b0c9a-1111-2222-3333-444455556666.jpg",
                "7",
            )
        ),
    ],
)
def test_words_of_a_name_leave_out_what_cameras_write(path, words):
    assert describe_picture(path, {}) == words


def test_a_description_has_keywords_people_month_and_place():
    fields = {
        "keywords": ["kite", "sea"],
        "people": ["Ada"],
        "taken": "2019-05-04T12:00:00",
        "city": "Rome",
        "country": "Italy",
        "latitude": 1.0,
    }
    assert describe_picture("a.jpg", fields) == "kite, sea, Ada, May 2019, Rome, Italy"
    assert describe_picture("a.jpg", {"taken": "soon", "keywords": 7}) is None


def test_the_sources_with_a_word_of_the_query_ignore_case_and_accents():
    sources = {"caption": "ein Café in Zürich", "name": "IMG 2031", "place": "Zurich"}
    assert find_sources(["cafe"], sources) == ("caption",)
    assert find_sources(["ZÜRICH", "x"], sources) == ("caption", "place")
    assert find_sources(["img 2031"], sources) == ("name",)
    assert find_sources(["caf"], sources) == ()


def test_coordinates_name_the_nearest_city():
    pytest.importorskip("reverse_geocode")
    rome = {"latitude": 41.9, "longitude": 12.49}
    assert find_place(rome) == {"city": "Rome", "country": "Italy"}
    assert find_place({"latitude": 0.0, "longitude": -30.0}) == {}  # the Atlantic
    assert find_place({"latitude": 91.0, "longitude": 0.0}) == {}
    assert find_place({}) == {}
