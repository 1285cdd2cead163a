"""Whether a page is what it promises: one well-formed file, without script, without a network, every text escaped."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

VOID = {"meta", "br"}
NUMBERS = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "points", "d", "viewBox"}
LARGEST_BYTES = 1_000_000


class _Elements(HTMLParser):
    """Elements that are open, and what was seen."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_page(text: str) -> str:
    """The words of a page that is as it must be."""
    assert len(text.encode()) < LARGEST_BYTES
    found = _Elements()
    found.feed(text)
    found.close()
    assert not found.open, f"never closed: {found.open}"
    assert not {"script", "iframe", "link", "img", "object", "form", "base"} & set(found.names)
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "style")]
    assert all(value.startswith("#") for name, value in found.attributes if name == "href")
    assert not re.search(r"url\(|@import|https?://", text)
    ids = [value for name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for name, value in found.attributes if name == "href"} <= set(ids)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        picture = ElementTree.fromstring(drawing)
        assert picture.get("role") == "img"
        numbers = [value for one in picture.iter() for name, value in one.items() if name in NUMBERS]
        assert not [value for value in numbers if re.search("nan|inf", value)]
    return " ".join(found.texts)


def sections_of(text: str) -> dict[str, str]:
    """Name -> HTML."""
    return dict(re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL))
