"""The page in a headless Chromium: chats, asks "same bits?" under load, and reads the digests. Needs a browser."""

import os
import shutil

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
sync_api = pytest.importorskip("playwright.sync_api")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None:
    pytest.skip("no Chromium here", allow_module_level=True)

from test_server import assert_all_given_back, serve

from engine import LLM


def test_chat_and_same_bits(tmp_path):
    llm = LLM(progress=False, num_gpu_blocks_override=128)
    with serve(llm, api_key="k3y") as (url, service), sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 1150})
        problems, elsewhere = [], []
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or elsewhere.append(request.url))
        page.goto(url)
        page.get_by_text("wrong or missing API key").wait_for()
        problems.clear()  # the browser's own note of the 401
        page.fill("#key", "k3y")
        page.locator("#key").blur()
        page.get_by_text(llm.fingerprint).wait_for()
        page.fill("[name=max_tokens]", "16")
        page.click("#send")
        page.locator("#send:enabled").wait_for()
        assert "seed 1" in page.locator(".message b").last.inner_text()
        assert len(page.locator(".message").last.inner_text()) > 20
        page.select_option("#load", "4")
        page.fill("#times", "4")
        page.click("#go")
        page.locator("#go:enabled").wait_for(timeout=60_000)
        digests = page.locator(".digest").all_inner_texts()
        page.screenshot(path=os.environ.get("SAMEBITS_SCREENSHOT", tmp_path / "page.png"))
        assert len(digests) == 4 and len(set(digests)) == 1 and len(digests[0]) == 16
        assert "All 4 alike" in page.locator("#verdict").inner_text()
        others = [int(text) for text in page.locator("#results td:nth-child(2)").all_inner_texts()]
        assert others[0] == 0 < max(others)
        assert not problems and not elsewhere
        browser.close()
        assert_all_given_back(service)
