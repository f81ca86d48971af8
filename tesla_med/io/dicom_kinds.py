"""What a DICOM file is by its meta information: an image, or what lies beside images in an archive."""

from __future__ import annotations

from pathlib import Path

OTHER = "DICOM, but"
"""How the reason begins why a file is left out that is no slice."""
_MARK = b"DICM"
_MOST = 2048
"""Bytes of meta information that are looked at; it takes a few hundred."""
_LONG = (b"OB", b"UN")
"""Value representations of meta elements whose length has four bytes, after two that are reserved."""
_SOP_CLASS = b"\x02\x00\x02\x00"
_STORAGE = "1.2.840.10008.5.1.4.1.1."
_KINDS = {
    "4.2": "a spectrum",
    "9": "a waveform",
    "11": "a presentation state",
    "66": "raw data",
    "66.1": "a registration",
    "66.2": "fiducials",
    "66.3": "a registration",
    "66.4": "a segmentation",
    "66.5": "a segmentation of surfaces",
    "66.6": "tracts",
    "66.7": "a segmentation",
    "66.8": "a segmentation",
    "67": "a table of real-world values",
    "68": "a surface",
    "88": "a structured report",
    "88.59": "a selection of key objects",
    "104": "a document",
    "200": "a protocol",
    "481": "an object of radiotherapy",
    "481.1": "a portal image of radiotherapy",
    "481.2": "a radiotherapy dose",
    "481.3": "a radiotherapy structure set",
    "481.4": "a radiotherapy treatment record",
    "481.5": "a radiotherapy plan",
}
"""Storage classes whose objects are no slices, by what follows in their identifiers, or its beginning."""


def no_image(path: Path) -> str:
    """Return what a DICOM file is that is no slice, such as a structured report; "" for a slice.

    A file whose meta information does not say what it is counts as a slice: reading it says what is wrong.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(132 + _MOST)
    except OSError:
        return ""
    name = _sop_class(start[132:]) if start[128:132] == _MARK else ""
    if not name.startswith(_STORAGE):
        return ""
    parts = name.removeprefix(_STORAGE).split(".")
    known = (_KINDS.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    kind = next((text for text in known if text), "")
    return f"{OTHER} {kind} and no slice of an image" if kind else ""


def _sop_class(meta: bytes) -> str:
    """Return the storage class that meta information names: elements in explicit little endian (PS3.10)."""
    place = 0
    while meta[place : place + 2] == _SOP_CLASS[:2]:
        wide = meta[place + 4 : place + 6] in _LONG
        begin = place + (12 if wide else 8)
        length = int.from_bytes(meta[begin - (4 if wide else 2) : begin], "little")
        if meta[place : place + 4] == _SOP_CLASS:
            return meta[begin : begin + length].decode("ascii", "replace").rstrip("\0 ")
        place = begin + length
    return ""
