"""Pictures of a run's report in a real browser: 1,280 and 400 pixels wide, light and dark.

    pip install playwright
    python -m benchmarks.report_pictures runs/digits-1/report.html pictures

The browser is the `chromium` or `google-chrome` on PATH, or the one of `playwright install
chromium`. Says of each picture how wide the page wants to be, which must not exceed the window, and
exits with 1 where it does or where the page asked for anything but itself.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_MISSING = (
    "needs playwright and a browser: pip install playwright, then `playwright install chromium` or "
    "`apt-get install chromium`"
)


def pictures(page: Path, folder: Path) -> bool:
    """Leaves four PNGs in ``folder``; whether each page fits its window and asked for nothing."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    fits = True
    with sync_playwright() as driver:
        found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                path = folder / f"{page.stem}-{width}-{scheme}.png"
                fits &= _picture(browser, page, path, width, scheme)
        browser.close()
    return fits


def _picture(browser: Any, page: Path, path: Path, width: int, scheme: str) -> bool:
    tab = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme=scheme, device_scale_factor=1.5
    )
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.resolve().as_uri())
    wants = tab.evaluate("document.documentElement.scrollWidth")
    tab.screenshot(path=str(path), full_page=True)
    tab.close()
    others = [url for url in asked if url != page.resolve().as_uri()]
    print(f"{path}: {wants} of {width} pixels wide, {len(others)} requests to other places")
    return wants <= width and not others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, help="report.html of a run")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    given = parser.parse_args()
    try:
        fits = pictures(given.page, given.folder)
    except Exception as error:
        if isinstance(error, ImportError) or "Executable doesn't exist" in str(error):
            sys.exit(_MISSING)
        raise
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
