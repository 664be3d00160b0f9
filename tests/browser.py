"""A real browser, without a window: Debian's chromium, driven by selenium. Tests that need it are skipped where it is missing."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "this test needs Debian's packages chromium and chromium-driver" if CHROMIUM is None or DRIVER is None else ""
needs_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)

_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
_MARGIN = 14


@contextmanager
def browser(profile: Path, *, width: int = 1400, height: int = 1000, dark: bool = False, phone: bool = False) -> Iterator[Any]:
    """A browser with an empty profile in ``profile``. ``phone``: it has a touch screen, and windows may be narrow."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for option in (*_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if phone:
        metrics = {"width": width, "height": height, "pixelRatio": 2.0, "touch": True, "mobile": True}
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(30)
        driver.set_script_timeout(30)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        yield driver
    finally:
        driver.quit()


def console_errors(driver: Any) -> list[str]:
    """What the console has said since the last call, besides notes."""
    return [each["message"] for each in driver.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]


def picture(driver: Any, path: Path, *, begin: str = "body", end: str = "body") -> None:
    """Write what is shown from the top of the element ``begin`` to the bottom of ``end`` as PNG, as wide as the page."""
    script = """
    const [first, last] = [arguments[0], arguments[1]].map((each) => document.querySelector(each).getBoundingClientRect());
    return [document.documentElement.scrollWidth, first.top + scrollY, last.bottom + scrollY];
    """
    width, top, bottom = driver.execute_script(script, begin, end)
    y = max(0, top - _MARGIN)
    clip = {"x": 0, "y": y, "width": width, "height": bottom + _MARGIN - y, "scale": 1}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip})
    path.write_bytes(base64.b64decode(shot["data"]))
