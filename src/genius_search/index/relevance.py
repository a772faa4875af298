"""Fitting the relevance of hits: how similar an encoder finds related texts, and unrelated ones."""

from __future__ import annotations

from typing import Final

import numpy as np

from genius_search.encoders.base import Encoder, ItemKey, TextInput
from genius_search.errors import GeniusError
from genius_search.index.settings import Relevance
from genius_search.nn.arrays import as_array

MIN_ACCURACY: Final = 0.5
"""Share of queries whose own text must be the most similar; otherwise the encoder does not know English."""

PAIRS: Final = (
    ("dog catching a ball", "A brown dog jumps into the air to catch a tennis ball."),
    ("how to boil eggs", "Put the eggs into boiling water and take them out after seven minutes."),
    ("cheap flights", "Book your plane ticket three months ahead; fares in spring are lowest."),
    ("symptoms of a cold", "A runny nose, a sore throat and sneezing are the usual signs of an infection."),
    ("reset my password", "If you cannot log in, click on the link below to choose a new password."),
    ("children playing football", "Two boys kick a soccer ball around on a grassy field."),
    ("red sports car", "The new roadster comes in bright red and reaches 200 km/h."),
    ("who painted the ceiling", "Michelangelo worked for four years on the frescoes of the chapel."),
    ("chocolate cake", "Melt the chocolate with butter, stir in sugar and flour, and bake for half an hour."),
    ("rent a flat in the city", "Two-bedroom apartment near the centre, available from May, 900 a month."),
    ("climate change", "Average temperatures have risen by one degree, and glaciers are retreating."),
    ("woman on a bicycle", "A lady in a green coat rides her bike along the canal."),
    ("job interview tips", "Arrive early, read about the company, and prepare questions for the recruiter."),
    ("fix a leaking tap", "Turn off the water, unscrew the faucet and replace the worn washer."),
    ("stock market fell", "Shares dropped sharply on Monday as investors sold technology companies."),
    ("mountains in winter", "Snow covers the peaks, and skiers wait for the lift in the sun."),
    ("growing roses", "Prune the bushes in March and water them well; roses like full sun."),
    ("invoice overdue", "We have not received your payment; please settle the bill within ten days."),
    ("learn the guitar", "Start with three chords and practise changing between them for ten minutes a day."),
    ("electric cars range", "The battery lasts 400 kilometres on one charge, less in cold weather."),
    ("wedding photos", "The bride and groom dance while their guests applaud."),
    ("history of Rome", "The empire reached its largest extent under Trajan in the second century."),
    ("man surfing", "A surfer in a wetsuit rides a large wave."),
    ("meeting moved to Tuesday", "The team call on Monday is cancelled and will take place a day later."),
    ("wireless headphones", "Bluetooth earphones with noise cancelling and thirty hours of playing time."),
    ("back pain exercises", "Lie on the floor, bend your knees and lift your hips to strengthen the spine."),
    ("fishing boat", "An old trawler lies in the harbour, its nets drying on deck."),
    (
        "python list sort",
        "Call sorted() to get a new list in ascending order; pass key= to compare by a function.",
    ),
    ("train delayed", "Because of a signal failure the express will arrive forty minutes late."),
    ("coffee with milk", "A cappuccino is made of espresso and hot milk foam."),
    ("solar panels", "Photovoltaic modules on the roof turn sunlight into electricity."),
    ("lost luggage", "If your suitcase does not arrive at the airport, report it at the baggage desk."),
    ("baby sleeping", "An infant lies asleep in a crib under a blue blanket."),
    ("school homework", "Pupils hand in their exercises to the teacher on Friday."),
    ("parliament election", "Voters go to the polls on Sunday to choose their representatives."),
    ("swimming pool", "A girl dives from the board into the clear water."),
    ("running shoes", "Light trainers with a soft sole for joggers."),
    ("vegetable soup", "Simmer carrots, leeks and potatoes in broth until they are tender."),
    ("heart disease", "Smoking and high blood pressure increase the risk of a cardiac arrest."),
    ("birthday party", "Friends sing while the child blows out the candles on the cake."),
    ("old castle", "The medieval fortress stands on a hill above the river."),
    (
        "computer is slow",
        "Close programs you do not need and add memory if your laptop takes long to respond.",
    ),
    ("horses in a field", "A mare and her foal graze on a meadow."),
    ("tax return", "Declare your income and deductions to the revenue office by the end of July."),
    ("jazz concert", "The saxophonist and her quartet play at the club tonight."),
    ("street in the rain", "People with umbrellas hurry over the wet pavement."),
    ("space telescope", "The orbiting observatory has sent pictures of distant galaxies."),
    ("cat on a sofa", "A kitten curls up on the couch between two cushions."),
)
"""Queries, each with a text that answers it, mostly in other words."""


def fit_relevance(encoder: Encoder) -> Relevance | None:
    """Measure the cosines of related and of unrelated texts; None if the encoder cannot tell them apart."""
    queries, texts = zip(*PAIRS, strict=True)
    try:
        rows = (
            as_array(encoder.text_features([TextInput(text, ItemKey("query", "")) for text in queries])),
            as_array(encoder.text_features([TextInput(text, ItemKey("candidate", "")) for text in texts])),
        )
    except GeniusError:  # an encoder that looks features up has none for these texts
        return None
    ours, theirs = (row / np.linalg.norm(row, axis=1, keepdims=True).clip(1e-9) for row in rows)
    cosines = (ours @ theirs.T).astype(np.float64)
    own = np.eye(len(PAIRS), dtype=bool)
    if (cosines.argmax(axis=1) == np.arange(len(PAIRS))).mean() < MIN_ACCURACY:
        return None
    return Relevance(
        related=float(cosines[own].mean()),
        unrelated=float(cosines[~own].mean()),
        spread=float(cosines[~own].std()),
    )
