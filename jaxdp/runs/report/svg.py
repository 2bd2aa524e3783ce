"""Figures as SVG elements in a page, with the page's fonts and colours."""

import io
import re
from xml.etree import ElementTree

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# By the page's name: the colour in light mode, which figures are drawn with, and in dark mode. All
# but that of grid lines have a contrast of 4.5 on the page's ground.
COLOURS = {
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": ("#57606a", "#9da7b3"),
    "line": ("#d0d7de", "#3d444d"),
    "blue": ("#0072b2", "#58a6ff"),
    "orange": ("#b34700", "#ffa657"),
}
INK, SOFT, LINE, BLUE, ORANGE = (light for light, _ in COLOURS.values())
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


def style() -> str:
    """CSS that defines the colours, for light and dark mode."""
    light, dark = (
        " ".join(f"--{name}: {pair[mode]};" for name, pair in COLOURS.items()) for mode in (0, 1)
    )
    return (
        f":root {{ {light} }} @media screen and (prefers-color-scheme: dark) "
        f"{{ :root {{ {dark} }} }}"
    )


def inline(figure: Figure, name: str, words: str) -> str:
    """An <svg> element for a page, with ``words`` as its description for screen readers.

    Args:
        figure: drawn in this module's colours alone.
        name: begins every id, so that figures of one page do not mix theirs up.
        words: what the figure shows.
    """
    buffer = io.BytesIO()
    # The hash salt and no date: the same figure is the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        FigureCanvasSVG(figure)
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    root = ElementTree.fromstring(buffer.getvalue())
    for child in list(root):
        if child.tag == f"{_SVG}metadata":
            root.remove(child)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{_SVG}style":
                parent.remove(child)
    for element in root.iter():
        _use_page_style(element, name)
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": words,
        "style": "stroke-linejoin: round; stroke-linecap: butt",
    }
    ElementTree.register_namespace("", _SVG[1:-1])
    return ElementTree.tostring(root, encoding="unicode").replace(f" {_NAMESPACE}", "", 1)


def standalone(element: str) -> str:
    """The text of an SVG file from an element of ``inline``; inverse of ``embedded``."""
    head = f"<svg {_NAMESPACE}"
    text = element.replace("<svg", head, 1)
    return text.replace(">", f"><style>{style()} svg {{ font-family: sans-serif }}</style>", 1)


def embedded(file: str) -> str:
    """The element in an SVG file that ``standalone`` made."""
    return re.sub(r"<style>.*?</style>", "", file, count=1).replace(f" {_NAMESPACE}", "", 1)


def _use_page_style(element: ElementTree.Element, name: str) -> None:
    if "id" in element.attrib:
        element.attrib["id"] = f"{name}-{element.attrib['id']}"
    if target := element.attrib.pop(_LINK, None):
        element.attrib["href"] = f"#{name}-{target[1:]}"
    for key in ("style", "clip-path", "fill", "stroke"):
        if key in element.attrib:
            value = re.sub(r"url\(#", f"url(#{name}-", element.attrib[key])
            # The page's font: only its size and weight are the figure's.
            value = re.sub(r"font: ((?:\w+ )*)([\d.]+px)[^;]*", _size_and_weight, value)
            for colour, (light, _) in COLOURS.items():
                value = value.replace(light, f"var(--{colour})")
            element.attrib[key] = value
    # Without its colour a text is black in the dark, too.
    if element.tag == f"{_SVG}text" and "fill" not in element.attrib.get("style", ""):
        element.attrib["style"] = f"{element.attrib.get('style', '')}; fill: var(--ink)"


def _size_and_weight(match: re.Match[str]) -> str:
    weight = f"; font-weight: {match[1].strip()}" if match[1].strip() else ""
    return f"font-size: {match[2]}{weight}"
