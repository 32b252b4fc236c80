"""The two nomenclatures of BigEarthNet: 43 CORINE classes of level 3, and the 19 that they were grouped into.

Names and orders are those of `label_indices.json` (BigEarthNet-S2_19-classes_models, TU Berlin). Beware of names that
contain commas, and of "Transitional woodland/shrub" (43), which is "Transitional woodland, shrub" among the 19.
"""

import difflib
from collections.abc import Sequence

import numpy as np

from tutti.errors import DataError

GROUPS: dict[str, tuple[str, ...]] = {
    "Urban fabric": ("Continuous urban fabric", "Discontinuous urban fabric"),
    "Industrial or commercial units": ("Industrial or commercial units",),
    "Arable land": ("Non-irrigated arable land", "Permanently irrigated land", "Rice fields"),
    "Permanent crops": (
        "Vineyards",
        "Fruit trees and berry plantations",
        "Olive groves",
        "Annual crops associated with permanent crops",
    ),
    "Pastures": ("Pastures",),
    "Complex cultivation patterns": ("Complex cultivation patterns",),
    "Land principally occupied by agriculture, with significant areas of natural vegetation": (
        "Land principally occupied by agriculture, with significant areas of natural vegetation",
    ),
    "Agro-forestry areas": ("Agro-forestry areas",),
    "Broad-leaved forest": ("Broad-leaved forest",),
    "Coniferous forest": ("Coniferous forest",),
    "Mixed forest": ("Mixed forest",),
    "Natural grassland and sparsely vegetated areas": ("Natural grassland", "Sparsely vegetated areas"),
    "Moors, heathland and sclerophyllous vegetation": ("Moors and heathland", "Sclerophyllous vegetation"),
    "Transitional woodland, shrub": ("Transitional woodland/shrub",),
    "Beaches, dunes, sands": ("Beaches, dunes, sands",),
    "Inland wetlands": ("Inland marshes", "Peatbogs"),
    "Coastal wetlands": ("Salt marshes", "Salines"),
    "Inland waters": ("Water courses", "Water bodies"),
    "Marine waters": ("Coastal lagoons", "Estuaries", "Sea and ocean"),
}
"""Each of the 19 classes, and those of the 43 that it is made of. Eleven of the 43 are in none."""

LABELS_43: tuple[str, ...] = (
    "Continuous urban fabric",
    "Discontinuous urban fabric",
    "Industrial or commercial units",
    "Road and rail networks and associated land",
    "Port areas",
    "Airports",
    "Mineral extraction sites",
    "Dump sites",
    "Construction sites",
    "Green urban areas",
    "Sport and leisure facilities",
    "Non-irrigated arable land",
    "Permanently irrigated land",
    "Rice fields",
    "Vineyards",
    "Fruit trees and berry plantations",
    "Olive groves",
    "Pastures",
    "Annual crops associated with permanent crops",
    "Complex cultivation patterns",
    "Land principally occupied by agriculture, with significant areas of natural vegetation",
    "Agro-forestry areas",
    "Broad-leaved forest",
    "Coniferous forest",
    "Mixed forest",
    "Natural grassland",
    "Moors and heathland",
    "Sclerophyllous vegetation",
    "Transitional woodland/shrub",
    "Beaches, dunes, sands",
    "Bare rock",
    "Sparsely vegetated areas",
    "Burnt areas",
    "Inland marshes",
    "Peatbogs",
    "Salt marshes",
    "Salines",
    "Intertidal flats",
    "Water courses",
    "Water bodies",
    "Coastal lagoons",
    "Estuaries",
    "Sea and ocean",
)
LABELS_19: tuple[str, ...] = tuple(GROUPS)
NOMENCLATURES: dict[int, tuple[str, ...]] = {43: LABELS_43, 19: LABELS_19}

_INDEX = {label: index for index, label in enumerate(LABELS_43)}


def multi_hot(labels: Sequence[str], where: str) -> np.ndarray:
    """Return the labels of a patch as 43 numbers, 0 or 1.

    Args:
        labels: names of the 43-class nomenclature, in any order.
        where: the file that they come from, for messages.

    Raises:
        DataError: a name is not one of the 43.
    """
    row = np.zeros(len(LABELS_43), dtype=np.uint8)
    for label in labels:
        if label not in _INDEX:
            raise DataError(f"{where} has the label {label!r}, which is none of BigEarthNet's 43; {_hint(label)}")
        row[_INDEX[label]] = 1
    return row


def _hint(label: object) -> str:
    if label in GROUPS:
        names = " or ".join(repr(name) for name in GROUPS[str(label)])
        return f"it belongs to the 19-class nomenclature, and the files of patches hold the 43-class one ({names})"
    near = difflib.get_close_matches(str(label), LABELS_43, n=1)
    return f"write {near[0]!r}" if near else "correct the file, or leave the patch out with --exclude"


def grouping() -> np.ndarray:
    """Return a (43, 19) matrix of 0 and 1: which of the 19 classes each of the 43 is in."""
    matrix = np.zeros((len(LABELS_43), len(LABELS_19)), dtype=np.uint8)
    for column, members in enumerate(GROUPS.values()):
        matrix[[_INDEX[member] for member in members], column] = 1
    return matrix


def in_nomenclature(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return (n, 43) labels as (n, classes).

    Args:
        labels: 0 and 1, (n, 43).
        classes: 43 or 19. Patches whose classes were all dropped from the 19 have a row of zeros.

    Raises:
        DataError: there is no nomenclature of that size.
    """
    if classes not in NOMENCLATURES:
        raise DataError(f"BigEarthNet has no nomenclature of {classes} classes; use 43 or 19")
    return labels if classes == 43 else (labels @ grouping()).clip(0, 1)
