"""The browser of this machine, for tests of pages."""

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium, chromium-browser or google-chrome on this machine: install one (`apt install chromium`)",
)
