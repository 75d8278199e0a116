"""How long a report takes to be there: seconds from the request to the last picture, and of the page's processor.

    python tools/measure_report.py [--times 7] PAGE [PAGE ...]

Pages are opened in turn, so that a machine that is busy slows all of them alike.  Needs Chromium and Playwright.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

WINDOW = {"width": 1440, "height": 900}
# Marks the frame that shows the last picture.
WATCH = """new MutationObserver((_, self) => {
  if (!document.documentElement?.dataset.ready) return;
  self.disconnect();
  requestAnimationFrame(() => setTimeout(() => performance.mark("drawn")));
}).observe(document, { attributes: true, subtree: true, attributeFilter: ["data-ready"] })"""


def open_once(browser: Browser, page: Path) -> tuple[float, float, float]:
    """Seconds until what is in view is drawn, until everything is, and of the main thread's processor."""
    context = browser.new_context(viewport=WINDOW)
    tab = context.new_page()
    tab.add_init_script(WATCH)
    session = context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    tab.goto(page.resolve().as_uri(), wait_until="commit")
    tab.wait_for_selector("html[data-ready=yes]", state="attached")
    tab.wait_for_timeout(200)
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    shown, drawn = tab.evaluate("['shown', 'drawn'].map((name) => performance.getEntriesByName(name)[0]?.startTime)")
    context.close()
    return (shown or drawn) / 1000, drawn / 1000, metrics["TaskDuration"]


def main() -> None:
    """Print the medians of each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--times", type=int, default=7, help="how often each page is opened")
    given = parser.parse_args()
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    seconds: dict[Path, list[tuple[float, float, float]]] = {page: [] for page in given.pages}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(given.times):
            for page, taken in seconds.items():
                taken.append(open_once(browser, page))
        browser.close()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {given.times} (least to most), seconds")
    for page, taken in seconds.items():
        columns = zip(("in view", "all drawn", "processor"), zip(*taken, strict=True), strict=True)
        cells = (f"{name} {statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for name, v in columns)
        print(f"{page}: {', '.join(cells)}")


if __name__ == "__main__":
    main()
