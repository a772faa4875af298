"""A model by its name: found, pulled, saved, published. PyTorch is imported only to open one.

So a name that is not on this machine is said within seconds where there is no network.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TypeVar

from genius_search.hub.pull import find_model
from genius_search.hub.push import About, push, save_model
from genius_search.progress import Progress

Model = TypeVar("Model", bound="Genius")


class Genius:
    """What can be had of a model without computing; :class:`genius_search.model.Genius` is a model that is open.

    >>> model = Genius.from_pretrained("owner/name")  # doctest: +SKIP
    >>> model.save_pretrained("my-model", license="mit")  # doctest: +SKIP
    """

    folder: Path

    @classmethod
    def open(  # noqa: PYI019  beartype cannot check Self
        cls: type[Model], folder: str | Path, *, device: str = "cpu", download: bool = False
    ) -> Model:
        """Open a finished model; :meth:`genius_search.model.Genius.open` says the rest."""
        opened: Model = importlib.import_module("genius_search.model").Genius.open(
            folder, device=device, download=download
        )
        return opened

    @classmethod
    def from_pretrained(  # noqa: PYI019  as above
        cls: type[Model],
        name_or_folder: str | Path,
        *,
        revision: str | None = None,
        device: str = "cpu",
        download: bool = True,
        token: str | None = None,
        progress: Progress | None = None,
    ) -> Model:
        """Open a model by its folder, or by its name on the Hugging Face hub.

        A folder, or a name that was pulled before, is opened without asking the network; `genius pull`
        fetches what is newer. A name that is not here is downloaded, as everywhere in that world, into that
        library's cache, unless ``download=False``, ``GENIUS_OFFLINE=1`` or ``HF_HUB_OFFLINE=1``.

        Raises
        ------
        NetworkNeeded
            it is not here and cannot be downloaded; said within about two seconds.
        ArtifactMissing
            there is no such folder or repository.
        ArtifactMismatch
            a file is damaged, or the model points to something outside its folder.
        """
        folder = find_model(
            name_or_folder, revision=revision, download=download, token=token, progress=progress
        )
        return cls.open(folder, device=device, download=download)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        license: str = "unknown",  # noqa: A002  the word of every model card
        datasets: tuple[str, ...] = (),
        results: str | Path | None = None,
        copy_encoder: bool = True,
        progress: Progress | None = None,
    ) -> Path:
        """Write the model as a folder that opens anywhere and holds a card; complete or not at all.

        Parameters
        ----------
        name
            how others will call it, ``owner/name``; the card shows it.
        license, datasets
            what the card says of the weights: the licence's short name, the training data's names.
        results
            the ``results.json`` of an evaluation of this model; left out, the one in its ``evaluation``
            folder, where there is one.
        copy_encoder
            take an encoder along that is a folder on this machine. One from the hub stays a name.
        progress
            is told when numbers of another model are left out.

        Raises
        ------
        UsageError
            the folder holds something else than a saved copy of this model; the encoder only looks features
            up; or ``results`` are another model's.
        """
        about = About(name, license, datasets, None if results is None else Path(results))
        return save_model(self.folder, Path(folder), about, copy_encoder=copy_encoder, progress=progress)

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool = False,
        license: str = "unknown",  # noqa: A002  as above
        datasets: tuple[str, ...] = (),
        results: str | Path | None = None,
        token: str | None = None,
        progress: Progress | None = None,
    ) -> str:
        """Publish the model as ``owner/name``; its address.

        Raises
        ------
        NetworkNeeded
            the hub cannot be reached.
        ArtifactMissing
            one may not write there: log in first.
        """
        about = About(repository, license, datasets, None if results is None else Path(results))
        return push(self.folder, repository, about, private=private, token=token, progress=progress)
