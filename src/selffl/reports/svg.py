"""Figures of a study as elements of a page: what draws is kept, and whatever could run, load or cover it is left out.

A study's folder may come from somebody else.  So a file is parsed, and only elements, attributes and properties that a
drawing needs are written again; what is not on these lists is gone.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from selffl.errors import DataError, one_line
from selffl.reports import figures

SVG = "{http://www.w3.org/2000/svg}"
SHAPES = "path rect circle ellipse line polyline polygon use image"
ELEMENTS = frozenset(f"svg g defs clipPath text tspan {SHAPES}".split(" "))
PLACES = "x y x1 y1 x2 y2 cx cy r rx ry dx dy d points width height viewBox transform"
STROKE = "stroke stroke-width stroke-opacity stroke-linejoin stroke-linecap stroke-miterlimit stroke-dasharray"
FONT = "font font-size font-family font-style font-weight text-anchor"
FILL = "fill fill-opacity fill-rule opacity clip-path clip-rule image-rendering stroke-dashoffset"
PROPERTIES = frozenset(f"{STROKE} {FONT} {FILL}".split(" "))
ATTRIBUTES = PROPERTIES.union(PLACES.split(" "), ("id", "style", "href"))
OWN_PICTURE = "data:image/png;base64,"  # as a heat map has it

# In the page the ink follows the reader's light or dark setting, and the white ground goes.
_INK = re.compile(figures.INK, re.IGNORECASE)
_OUTWARD = re.compile(r"\\|@|<|url\((?!#)", re.IGNORECASE)  # what a value could ask for, beyond its own file
_OWN_ID = re.compile(r"url\(#")


def embed(path: Path, caption: str, prefix: str) -> str:
    """A figure file as an SVG element; ids get a prefix so that two figures of one page do not share any."""
    try:
        text = path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text[text.index("<svg") :])  # without a document type, which could name entities
        if root.tag != f"{SVG}svg":
            raise ValueError(f"it begins with {root.tag}")
        for parent in root.iter():
            for child in list(parent):
                if not _is_drawn(child):
                    parent.remove(child)
        for element in root.iter():
            element.tag = element.tag.removeprefix(SVG)
            element.attrib = _kept(element, prefix)
        root.attrib |= {"role": "img", "aria-label": caption}
        return ElementTree.tostring(root, encoding="unicode")
    except OSError:
        raise DataError(f"{path} is gone; expected the figure that the record names. Run the study again.") from None
    except (ValueError, ElementTree.ParseError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({one_line(error)}); expected an SVG figure. Run the study again."
        ) from None


def _is_drawn(element: ElementTree.Element) -> bool:
    is_known = (
        isinstance(element.tag, str) and element.tag.startswith(SVG) and element.tag.removeprefix(SVG) in ELEMENTS
    )
    return is_known and element.get("id") != figures.BACKGROUND


def _kept(element: ElementTree.Element, prefix: str) -> dict[str, str]:
    """The attributes that draw, with ids of their own; colours of ink as the page has them."""
    kept = {}
    for name, value in element.attrib.items():
        plain = name.rpartition("}")[2]
        if plain not in ATTRIBUTES or (_OUTWARD.search(value) and plain != "href"):
            continue
        if plain == "id":
            value = f"{prefix}-{value}"
        elif plain == "href":
            if value.startswith("#"):
                value = f"#{prefix}-{value[1:]}"
            elif element.tag != "image" or not value.startswith(OWN_PICTURE):
                continue
        elif plain == "style":
            pairs = [one.partition(":") for one in value.split(";")]
            value = "; ".join(f"{key.strip()}:{what}" for key, _, what in pairs if key.strip() in PROPERTIES)
        if plain not in ("id", "href"):
            value = _OWN_ID.sub(f"url(#{prefix}-", _INK.sub("currentColor", value))
        kept[plain] = value
    return kept
