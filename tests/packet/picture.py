"""The picture of a packet in the README: `python tests/packet/picture.py RUN FILE.png`.

The first screen of the page, down to the worst cell's inventory, as a Chromium shows it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.packet.chromium import EXECUTABLE, MISSING, NOTHING_SKIPPED, Chromium, opened

SIZE = (1200, 1240)


def main() -> None:
    """Open the page of the run and write what its window shows."""
    if EXECUTABLE is None:
        raise SystemExit(MISSING)
    page, target = Path(sys.argv[1], "index.html").resolve(), Path(sys.argv[2])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Chromium(Path(profile))
        with opened(browser, page.as_uri(), SIZE[0]) as tab:
            tab.resize(*SIZE)
            tab.run(NOTHING_SKIPPED)
            target.write_bytes(tab.picture(whole=False))
        browser.close()


if __name__ == "__main__":
    main()
