"""The order lab shows any text as text, on any screen, and to who uses no mouse: in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browsers import needs_chromium
from tests.server.conftest import Opener
from tests.server.lab import CONTRASTS, HOSTILE, Lab, content_of

pytestmark = needs_chromium


def test_hostile_documents_and_questions_are_text(lab: Lab) -> None:
    lab.paste(*HOSTILE)
    lab.question.fill('<img src=x onerror="alert(7)">')
    lab.ask()
    texts = lab.page.locator("#documents details p").all_text_contents()
    assert [*texts[:2], texts[5]] == [*HOSTILE[:2], HOSTILE[5]]
    assert lab.page.locator("#documents strong").text_content() == "<b onclick=alert(3)>Title</b>"
    assert texts[2] == "<iframe src=javascript:alert(4)></iframe>"
    assert texts[4].startswith("nul \u2400 escape \u241b[31m back \ufffdgnp.exe\ufffd tag ")
    assert lab.page.locator("img, iframe, main b").count() == 0
    assert lab.page.locator("script").count() == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_copied_command_gets_the_same_answer(open_lab: Opener, base_url: str) -> None:
    lab = open_lab(base_url, permissions=["clipboard-read", "clipboard-write"])
    lab.paste(*HOSTILE)
    lab.ask()
    lab.page.locator("#plain").get_by_role("button", name="Copy as curl").click()
    expect(lab.status).to_have_text("The command is copied.")
    command = lab.page.evaluate("navigator.clipboard.readText()")
    assert command.replace("\n", "").isprintable()
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert content_of(json.loads(run.stdout)) == lab.answer("plain").text_content()


def test_without_a_clipboard_the_command_is_shown(open_lab: Opener, base_url: str) -> None:
    lab = open_lab(base_url.replace("127.0.0.1", "lab.test"))  # no secure context, so no access to the clipboard
    lab.ask()
    lab.page.locator("#invariant").get_by_role("button", name="Copy as curl").click()
    dialog = lab.page.get_by_role("dialog", name="Copy this command")
    assert dialog.get_by_role("textbox").input_value().startswith(f"curl '{lab.url}/v1/chat/completions'")


def test_files_are_read_and_what_is_no_text_is_refused_by_name(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "ferry.txt").write_text("The ferry leaves at noon.\n\nNot in winter.", "utf-8")
    (tmp_path / "scan.txt").write_bytes(b"%PDF \xff\xfe")
    lab.press("Remove all")
    lab.page.locator("#files").set_input_files([tmp_path / "ferry.txt", tmp_path / "scan.txt"])
    expect(lab.page.locator("#documents strong")).to_have_text("ferry")
    expect(lab.page.locator("#documents > li")).to_have_count(1)
    expect(lab.page.locator("#notice")).to_have_text("scan.txt: expected text in UTF-8. Save it as text, or paste it.")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_everything_fits_and_has_contrast(width: int, scheme: str, open_lab: Opener, base_url: str) -> None:
    lab = open_lab(base_url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    ground = lab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 120) == (scheme == "dark")
    lab.page.get_by_text("Add documents", exact=True).click()
    lab.try_orders()
    texts, faint = lab.page.evaluate(CONTRASTS)
    assert texts > 100
    assert faint == []
    lab.paste(*HOSTILE)
    lab.ask()
    assert lab.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_focus_is_seen_on_every_control(lab: Lab) -> None:
    lab.ask()
    lab.page.locator("h1").click()
    seen = set()
    for _ in range(12):
        lab.page.keyboard.press("Tab")
        focused = "document.activeElement"
        name, outline = lab.page.evaluate(f"[{focused}.outerHTML, getComputedStyle({focused}).outline]")
        assert "solid 3px" in outline, name
        seen.add(name)
    assert len(seen) == 12


def test_a_screen_reader_finds_names_and_roles(lab: Lab) -> None:
    lab.ask()
    for region in ("Documents", "Question", "Orders asked", "What was read where"):
        expect(lab.page.get_by_role("region", name=region)).to_be_visible()
    for name in ("Plain", "Plain, sorted", "rotor"):
        expect(lab.page.get_by_role("article", name=name, exact=True)).to_contain_text("Confidence")
    expect(lab.page.get_by_role("heading", level=1, name="Order lab")).to_be_visible()
    controls = lab.page.get_by_role("main").locator("button:visible, input:visible, select:visible")
    assert controls.count() > 25
    assert not [
        each.aria_snapshot() for each in controls.all() if not re.match(r"""- '?\w+ ".""", each.aria_snapshot())
    ]
