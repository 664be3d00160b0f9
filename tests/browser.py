"""A real browser, without a window: Debian's chromium, driven by selenium. Tests that need it are skipped where it is missing."""

from __future__ import annotations

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


def picture(driver: Any, path: Path, *, whole: bool = True) -> None:
    """Write what is shown, or the whole page, as PNG."""
    import base64

    size = driver.execute_script("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    clip = {"clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}} if whole else {}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole, **clip})
    path.write_bytes(base64.b64decode(shot["data"]))
